"""Three real processes; one is killed, one is stopped, one is slow, all at random; what is left of the time
is spent learning.
"""

import os
import random
import signal
import time

import pytest
from test_outer_loop import LEASE, end, launch, newest, numbers, rounds_of
from waiting import until

SECONDS = 16.0
DELAYS = (0.01, 0.01, 0.04)


class Life:
    "One process: when it stood still through no fault of its own."

    def __init__(self, folder, rank):
        self.folder, self.rank, self.pauses = folder, rank, []
        self.process = launch(
            folder,
            rank,
            DELAYS[rank],
            compression="int8",
            lease_s=2 * LEASE,
            grace_s=LEASE / 2,
            snapshot_every=4,
        )

    def steps(self) -> list[float]:
        return numbers(self.folder, self.process, self.rank)

    def stop(self, seconds: float) -> None:
        "SIGSTOP, wait, SIGCONT."
        os.kill(self.process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        time.sleep(seconds)
        os.kill(self.process.pid, signal.SIGCONT)
        self.pauses.append((begun, time.monotonic()))

    def learning(self, begin: float, finish: float) -> tuple[int, float]:
        "Steps in a span, and the seconds of it in which the process was alive and not stopped."
        times = [at for at in self.steps() if begin <= at <= finish]
        if len(times) < 2:
            return 0, 0.0
        stopped = sum(max(0.0, min(b, times[-1]) - max(a, times[0])) for a, b in self.pauses)
        return len(times) - 1, times[-1] - times[0] - stopped


@pytest.mark.parametrize("seed", [5])
def test_chaos(tmp_path, processes, seed):
    rng = random.Random(seed)
    lives = [Life(tmp_path, rank) for rank in range(3)]
    now = list(lives)
    processes += [life.process for life in lives]
    until(lambda: all(newest(tmp_path, life.process, life.rank) >= 2 for life in now), 40)
    healthy_from = time.monotonic()
    time.sleep(3.0)
    begun = time.monotonic()
    healthy = {life.rank: life.learning(healthy_from, begun) for life in now}
    kills = stops = 0
    while time.monotonic() - begun < SECONDS:
        time.sleep(rng.uniform(0.3, 1.2))
        life = now[rng.randrange(3)]
        if stops > kills:
            os.kill(life.process.pid, signal.SIGKILL)
            life.process.join()
            time.sleep(rng.uniform(0.0, 1.5 * LEASE))
            again = Life(tmp_path, life.rank)
            processes.append(again.process)
            now[life.rank] = again
            lives.append(again)
            kills += 1
        else:
            life.stop(rng.uniform(0.2, 2.0 * LEASE))
            stops += 1
    finished = time.monotonic()
    until(lambda: all(len(rounds_of(tmp_path, life.process, life.rank)) >= 2 for life in now), 30)
    results = end(tmp_path, [life.process for life in now], 40)

    assert kills >= 2 and stops >= 3
    made = wanted = 0.0
    for life in lives:
        steps, seconds = life.learning(begun, finished)
        rate = healthy[life.rank][0] / healthy[life.rank][1]
        made, wanted = made + steps * DELAYS[life.rank], wanted + rate * seconds * DELAYS[life.rank]
    print(f"goodput {made / wanted:.3f}, kills {kills}, stops {stops}, round {results[0]['round']}")
    assert made / wanted >= 0.8, f"goodput {made / wanted:.3f} of the healthy rate"
    rounds = [newest(tmp_path, life.process, life.rank) for life in now]
    assert min(rounds) >= 8, rounds
    assert len({(result["params"], result["outer"], result["round"]) for result in results.values()}) == 1
    assert all(result["included"] > 0 for result in results.values()), (
        "each had a part in some round since it came back"
    )
