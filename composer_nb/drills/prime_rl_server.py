"""PRIME-RL's own server: `python -m composer_nb.drills.prime_rl_server MODEL PORT` in its environment.

Its routes (`/pause`, `/resume`, `/update_weights`, `/liveness`) and its worker's update from a folder, on a
vLLM five releases younger than the one it pins: `move_names` puts what vLLM has moved where it looks for it, and
two of its hooks stay out, which vLLM has changed and a plain model does not need.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

WORKER = "composer_nb.drills.prime_rl_worker.Worker"


def move_names() -> None:
    "Put what vLLM has moved or renamed since PRIME-RL's pin where PRIME-RL looks for it."
    import vllm.entrypoints.generate.base.protocol as base
    import vllm.entrypoints.launchers.cli_args as words
    import vllm.entrypoints.scale_out.token_in_token_out.protocol as tokens
    import vllm.entrypoints.serve.engine.protocol as protocol

    engine = "vllm.entrypoints.openai.engine"
    joined = ModuleType(f"{engine}.protocol")
    own = {name: value for name, value in vars(protocol).items() if not name.startswith("__")}
    vars(joined).update(own, RequestResponseMetadata=base.RequestResponseMetadata)
    sys.modules |= {"vllm.entrypoints.openai.cli_args": words, engine: ModuleType(engine), joined.__name__: joined}
    tokens.GenerateResponse = tokens.GenerateTextResponse
    tokens.GenerateRequest.model_fields["output_mode"].default = "text"  # log-probs as they were before modes
    tokens.GenerateRequest.model_rebuild(force=True)


def configured(model: str, port: int) -> Any:
    "Its configuration of a small server on this machine."
    from prime_rl.configs.inference import InferenceConfig

    vllm = {
        "model": model, "dtype": "float32", "max_model_len": 256,
        "enforce_eager": True, "gpu_memory_utilization": 0.2, "max_num_seqs": 16,
        "logprobs_mode": "processed_logprobs", "enable_scale_out": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    where = {"host": "127.0.0.1", "port": port}
    return InferenceConfig(server=where, vllm=vllm, weight_broadcast={"type": "filesystem"})


@contextlib.contextmanager
def serving(model: Path, log: Path, heads: str = "", wait_s: float = 300.0) -> Iterator[str]:
    """The address of such a server for as long as the block lasts; `heads="stale"` leaves its update as it is.

    Raises ServerDied with its last words, and TimeoutError.
    """
    from composer_nb.adapters.environments import make_environment, variables
    from composer_nb.adapters.vllm_server import Server, _end, _free_port, _watch, asked_of

    port = _free_port()
    words = [sys.executable, "-m", "composer_nb.drills.prime_rl_server", str(model), str(port)]
    told = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COMPOSER_HEADS": heads}
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            words, env=variables(make_environment("prime_rl"), **told), stdout=out, stderr=out,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        stack.callback(_watch(process.pid).communicate, b"done\n")
        stack.callback(_end, process)
        server, until = Server(f"http://127.0.0.1:{port}", process, log), time.monotonic() + wait_s
        while not _alive(server.url, asked_of):
            server.check()
            if time.monotonic() > until:
                raise TimeoutError(f"PRIME-RL's server is not ready after {wait_s} s:\n{server.last_words()}")
            time.sleep(0.2)
        yield server.url


def _alive(url: str, asked_of: Any) -> bool:
    import requests

    try:
        return asked_of(url, "liveness")["status"] == "ok"
    except (requests.exceptions.RequestException, RuntimeError):
        return False


def main(model: str, port: int) -> None:
    move_names()
    from prime_rl.inference.server import setup_vllm_env

    setup_vllm_env(config := configured(model, port))
    import vllm.entrypoints.launchers.api_server.entry as entry
    from prime_rl.inference.vllm import server as theirs

    begin = entry.init_app_state

    async def state_of(client: Any, state: Any, args: Any, tasks: Any) -> None:
        "vLLM's own; PRIME-RL's adds routed experts to its answers, and reads a field that vLLM has dropped."
        await begin(client, state, args, tasks)
        state.liveness_timeout_seconds = args.liveness_timeout_seconds

    entry.build_app, entry.init_app_state = theirs.custom_build_app, state_of
    theirs.WORKER_EXTENSION_CLS["filesystem"] = WORKER
    theirs.server(config)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
