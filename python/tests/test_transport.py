"""Messages of any length in rows of equal length."""

import torch
import torch.distributed as dist
from learners import on_learners

from adacomp.torch.transport import HEADER, NO_STEP, REMEMBERED, Transport


@on_learners(2)
def test_rows_follow_the_messages():
    """Learner 1's messages are twice as long as learner 0's."""
    lengths = [1000] * 3 + [10] * (REMEMBERED + 2)
    transport = Transport(dist.group.WORLD, torch.device("cpu"))
    learner, sent = dist.get_rank(), []
    for step, length in enumerate(lengths):
        before = transport.sent
        transport.begin_step()
        transport.start_all_gather(bytes([step]) * (length * (1 + learner)))
        messages = transport.finish()
        assert [len(message) for message in messages] == [length, 2 * length]
        assert all(set(message) == {step} for message in messages)
        sent.append(transport.sent - before)
        # A round that is not of a step does not take its rows, nor leave its own.
        before = transport.sent
        assert transport.all_gather(b"aside") == [b"aside"] * 2
        assert transport.sent - before <= 2 * (HEADER + 5)
    assert list(transport._longest) == [0, NO_STEP]
    # At first nothing is known, so there is a second round.
    assert sent[0] == HEADER + 2000
    long = HEADER + 2000 + 2000 // 32
    assert sent[1:3] == [long] * 2
    # Then the long ones are forgotten.
    assert sent[3 : 2 + REMEMBERED] == [long] * (REMEMBERED - 1)
    assert sent[-2:] == [HEADER + 20] * 2
