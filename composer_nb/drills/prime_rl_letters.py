"""A taskset and a harness of verifiers: write a word, get the share of letters; one request, no tools.

verifiers finds a taskset by the name of a module of its own, so this folder has to be on Python's path.
"""

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

from composer_nb.drills.prime_rl_run import WORDS
from composer_nb.drills.vllm_train import share

__all__ = ["LettersHarness", "LettersTaskset"]


class LettersTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    "Rewarded with the share of letters and spaces."

    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        return share([[{"content": trace.last_reply}]])[0]


class LettersTaskset(vf.Taskset[LettersTask, vf.TasksetConfig]):
    "A word a task."

    def load(self) -> list[LettersTask]:
        told = (vf.TaskData(idx=number, prompt=f"Write: {word}") for number, word in enumerate(WORDS))
        return [LettersTask(data, self.config.task) for data in told]


class LettersHarness(vf.Harness[vf.HarnessConfig]):
    "Asks once, through the endpoint at which verifiers listens."

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:  # noqa: ANN001
        said = [{"role": "user", "content": self.resolve_text_prompt(data)[1]}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=said)
        return ProgramResult(0, "", "")
