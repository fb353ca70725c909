"""Serves a model with a draft over HTTP, and calls it with OpenAI's client.

pip install "jspec-decoding[serve]" openai
python examples/serve.py
python examples/serve.py --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --prompt "Speculative decoding is"
"""

import argparse
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai


def wait_until_ready(url: str, server: subprocess.Popen) -> None:
    """Returns when the server answers; it loads the model first."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except urllib.error.URLError:
            time.sleep(0.2)
    raise SystemExit(f"the server ended with status {server.returncode}")


def main() -> None:
    """Starts the server, streams one completion, and ends the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:python-small")
    parser.add_argument("--draft", help="default: the draft that comes with the model, or n-grams")
    parser.add_argument("--prompt", default="def fibonacci(n):")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    with socket.socket() as probe:  # a free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "jspec", "serve", options.model, "--port", str(port), "--slots", "4"]
    server = subprocess.Popen(command + (["--draft", options.draft] if options.draft else []))
    try:
        wait_until_ready(url, server)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = client.completions.create(
                model=options.model,
                prompt=options.prompt,
                max_tokens=options.max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            print(options.prompt, end="")
            for chunk in stream:
                print("".join(choice.text for choice in chunk.choices), end="", flush=True)
                usage = chunk.usage
        print(f"\n{usage.completion_tokens} tokens; {usage.completion_tokens_details}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
