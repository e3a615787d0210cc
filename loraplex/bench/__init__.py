"""Load client, reports and plots: what `loraplex bench` runs against any OpenAI-compatible server."""
