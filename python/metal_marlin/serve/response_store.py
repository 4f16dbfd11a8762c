"""The responses that `store` keeps, for `previous_response_id` and `GET /v1/responses/{id}`."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StoredResponse:
    """A response, and all that the model had read for it but instructions."""

    response: dict[str, Any]
    items: list[Any]
    """The input items, with all items of the responses before it."""
    size: int


class ResponseStore:
    """Responses in memory, the least recently used of which are forgotten. For one thread.

    `most` responses are kept, and `most_bytes` of JSON. They are gone when the server ends.
    """

    def __init__(self, most: int = 1024, most_bytes: int = 64 << 20) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._owners: dict[str, str] = {}
        self._bytes = 0

    def put(self, response: dict[str, Any], items: list[Any]) -> None:
        """Keeps a finished response. One larger than the whole store is not kept."""
        size = len(json.dumps([response, items]))
        if size > self._most_bytes:
            return
        self._stored[response["id"]] = StoredResponse(response, items, size)
        self._owners.update({item["id"]: response["id"] for item in response["output"]})
        self._bytes += size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, name: str) -> StoredResponse | None:
        found = self._stored.get(name)
        if found is not None:
            self._stored.move_to_end(name)
        return found

    def item(self, name: str) -> Any:
        """An output item of a response that is kept, by its id; None if there is none."""
        found = self._stored.get(self._owners.get(name, ""))
        output = [] if found is None else found.response["output"]
        return next((item for item in output if item["id"] == name), None)

    def delete(self, name: str) -> bool:
        found = self._stored.pop(name, None)
        if found is None:
            return False
        for item in found.response["output"]:
            del self._owners[item["id"]]
        self._bytes -= found.size
        return True
