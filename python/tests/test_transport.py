"""Messages of any length in rows of equal length."""

import torch
import torch.distributed as dist

from adacomp.torch.transport import ASIDE, HEADER, REMEMBERED, Transport


def rows(lengths):
    """The bytes of a row at each of these lengths, of which learner 1's messages have twice as much."""
    transport = Transport.between(dist.group.WORLD, torch.device("cpu"))
    learner, sent = dist.get_rank(), []
    for step, length in enumerate(lengths):
        before = transport.sent
        transport.begin_step()
        transport.start_all_gather(bytes([step]) * (length * (1 + learner)))
        messages = transport.finish()
        assert [len(message) for message in messages] == [length, 2 * length]
        assert all(set(message) == {step} for message in messages)
        sent.append(transport.sent - before)
        # A round aside does not take a step's rows, nor leave its own.
        before = transport.sent
        assert transport.all_gather(b"aside") == [b"aside"] * 2
        assert transport.sent - before <= 2 * (HEADER + 5)
    assert list(transport._longest) == [0, ASIDE]
    return sent


def test_rows_follow_the_messages(learners):
    lengths = [1000] * 3 + [10] * (REMEMBERED + 2)
    for sent in learners(2).run(rows, lengths):
        # At first nothing is known, so there is a second round.
        assert sent[0] == HEADER + 2000
        long = HEADER + 2000 + 2000 // 32
        assert sent[1:3] == [long] * 2
        # Then the long ones are forgotten.
        assert sent[3 : 2 + REMEMBERED] == [long] * (REMEMBERED - 1)
        assert sent[-2:] == [HEADER + 20] * 2
