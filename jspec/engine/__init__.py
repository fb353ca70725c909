"""What users call: `load`, `generate`, `stream` and `generate_ids`, and the driver of the loop on the host."""
