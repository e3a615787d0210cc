"""OpenAI's /v1/responses, as another form of chats.

ResponsesRequest ── chat_request ──▶ ChatRequest ── the route of chats ──▶ ResponsesFormat
"""
