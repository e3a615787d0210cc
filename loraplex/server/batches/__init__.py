"""Files and batches: OpenAI's API for jobs that may take hours.

/v1/files, /v1/batches ──▶ BatchStore  what is on disk, by owner
                               ▲
BatchRunner ── BatchRun ───────┘  lines of the input, answered by the routes of this server
"""
