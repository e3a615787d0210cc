"""Load client, reports and plots of `loraplex bench`, for any OpenAI-compatible server."""
