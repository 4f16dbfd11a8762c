"""Generates greedily with vLLM in a process of its own.

Reads {"models": [paths], "prompts": [[ids]], "tokens": n, "options": {of LLM}} from standard input;
the last line of standard output is a list of {"tokens": [[ids]]} or {"error": text}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# The engine runs in this process, and its workers start as copies of it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def generate(model: str, task: dict[str, Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        disable_log_stats=True,
        **task["options"],
    )
    sampling = SamplingParams(
        max_tokens=task["tokens"], temperature=0, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    engine.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    task = json.load(sys.stdin)
    results: list[dict[str, Any]] = []
    for model in task["models"]:
        try:
            results.append({"tokens": generate(model, task)})
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
