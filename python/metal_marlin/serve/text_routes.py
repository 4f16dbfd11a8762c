"""POST /tokenize and /detokenize, in the shapes of vLLM."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from .api_docs import takes
from .chat_service import ChatRequest, ChatService
from .conversation import checked_tools
from .engine import Engine
from .errors import bad_request
from .protocol import DetokenizeBody, TokenizeBody, parse
from .requests import check_model, read_body


def register(app: FastAPI) -> None:
    engine: Engine = app.state.engine
    service: ChatService = app.state.service

    @app.post("/tokenize", openapi_extra=takes(TokenizeBody),
              summary="The token ids of a text or conversation")  # fmt: skip
    async def tokenize(request: Request) -> Response:
        body = parse(TokenizeBody, await read_body(request))
        check_model(app, body.model)
        ids = await _encoded(engine, service, body)
        document = {"count": len(ids), "max_model_len": engine.context, "tokens": ids}
        if body.return_token_strs:
            document["token_strs"] = [engine.codec.token(each) for each in ids]
        return JSONResponse(document)

    @app.post("/detokenize", openapi_extra=takes(DetokenizeBody), summary="The text of token ids")
    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeBody, await read_body(request))
        check_model(app, body.model)
        # A text of tokens that the tokenizer shows elsewhere too: special ones are part of it.
        text = await engine.in_pool(engine.codec.decode, body.tokens, False)
        return JSONResponse({"prompt": text})


async def _encoded(engine: Engine, service: ChatService, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "expected either prompt or messages")
    if body.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs",
                     "tools"):  # fmt: skip
            if getattr(body, name) is not None:
                raise bad_request(name, "only with messages")
        return await engine.encode(body.prompt, body.add_special_tokens is not False)
    if body.add_special_tokens:
        raise bad_request("add_special_tokens", "not with messages: the chat template adds them")
    assert body.messages is not None
    generation_prompt = body.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not body.continue_final_message
    request = ChatRequest(
        messages=body.messages,
        tools=checked_tools(body.tools),
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    return (await service.render(request)).ids
