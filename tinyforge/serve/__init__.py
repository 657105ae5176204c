"""A server that speaks OpenAI's protocol: `python -m tinyforge.serve`. docs/serving.md describes it."""
