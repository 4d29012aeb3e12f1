"""Serves with a small engine: a core in a process of its own, and a server that waits for requests.

`engine.py FOLDER LENGTH SHARE HOW`; HOW is `serve`, `end`, `hang` or `break`, all after the core has started, or
`never` for an engine that does not get ready.
"""

import asyncio
import json
import logging
import multiprocessing
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "like"))

from vllm.engine.arg_utils import EngineArgs


def run_core(config: Any, share: float, how: str, ready: Any) -> None:
    logging.basicConfig(level=logging.INFO)
    from vllm.v1.engine.core import EngineCore

    if how == "never":
        logging.getLogger("vllm.v1.engine.core").info("Waiting for %s", "Godot")
        time.sleep(600)
    core = EngineCore(config, share)
    print(json.dumps({"blocks": core.vllm_config.cache_config.num_gpu_blocks}), flush=True)
    ready.put(True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(600)


def serve(folder: str, length: str, share: str, how: str) -> None:
    config = EngineArgs(folder, max_model_len=int(length)).create_engine_config()
    print(json.dumps({"load_format": config.load_format, "skips": config.skip_tokenizer_init}), flush=True)
    spawning = multiprocessing.get_context("spawn")
    ready = spawning.Queue()
    core = spawning.Process(target=run_core, args=(config, float(share), how, ready))
    core.start()
    while ready.empty():
        if core.exitcode is not None:
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        time.sleep(0.05)
    if how == "break":
        core.kill()
        raise RuntimeError("The front end broke.")
    if how == "serve":
        from uvicorn.server import Server

        asyncio.run(Server().serve())
    if how == "hang":
        time.sleep(600)
    core.terminate()
    core.join(0.1)
    core.kill()


if __name__ == "__main__":
    import torch

    assert torch.cuda.is_available()
    serve(*sys.argv[1:])
