"""An HTTP server of OpenAI's API over an engine; requires the extra `serve`."""
