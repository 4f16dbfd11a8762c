"""`metal-marlin serve`: an OpenAI-compatible server over the scheduler of the core.

`server` starts it; `engine` steps the scheduler and hands texts to asyncio; `chat_service` makes
the pieces of chat answers; `app` has the HTTP endpoints, and `protocol` what they take.
"""
