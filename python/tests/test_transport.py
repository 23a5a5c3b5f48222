"""Messages of any length in rows of equal length."""

import pytest
import torch
import torch.distributed as dist
from learners import Learners, on_learners
from torch.nn.functional import cross_entropy
from training import STRATEGIES, attach, batch, make

from adacomp.torch.transport import HEADER, LONGEST_ASIDE, NO_STEP, REMEMBERED, Transport, longest_message


def connect(own_machines=False):
    """Connects all learners, which have machines for themselves, or share one."""
    with pytest.MonkeyPatch.context() as patch:
        if own_machines:
            patch.setattr("socket.gethostname", lambda: f"machine-{dist.get_rank()}")
        return Transport(dist.group.WORLD, torch.device("cpu"))


@pytest.mark.parametrize("own_machines", [False, True])
@on_learners(2)
def test_rows_follow_the_messages(own_machines):
    """Learner 1's messages are twice as long as learner 0's."""
    lengths = [1000] * 3 + [10] * (REMEMBERED + 2)
    transport = connect(own_machines)
    assert transport._direct == own_machines
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


def false_header(aside, all_gather):
    """Learner 1 says that its longest message has almost 4 GiB; no learner allocates anything for it."""
    transport = connect()
    transport.longest_message = 1000
    if not aside:
        transport.begin_step()
    move, widths = transport._move, []

    def changed(rows):
        widths.append(rows.shape[1])
        if dist.get_rank() == 1 and len(widths) == 1:
            rows[:, 4:HEADER].view("<u4")[:] = 2**32 - 1
        # Where the header is believed, learners x 4 GiB would follow.
        assert rows.shape[1] < 2**20
        return move(rows)

    transport._move = changed
    if all_gather:
        transport.start_all_gather(b"message")
    else:
        transport.start_all_to_all([b"message", b"another"])
    most = LONGEST_ASIDE if aside else 1000
    with pytest.raises(RuntimeError, match=f"learner 1 announces 7 bytes, and 4294967295 .* at most {most}"):
        transport.finish()
    assert widths == [HEADER]


@pytest.mark.parametrize("aside, all_gather", [(False, True), (False, False), (True, True)])
def test_no_memory_is_taken_for_a_false_header(aside, all_gather):
    with Learners(2) as two:
        two.run(false_header, aside, all_gather)


@on_learners(2)
def test_messages_up_to_the_longest_are_taken():
    transport = Transport(dist.group.WORLD, torch.device("cpu"))
    transport.longest_message = 1000
    transport.begin_step()
    for length in (1000, 0, 1000):
        transport.start_all_gather(bytes(length))
        assert [len(message) for message in transport.finish()] == [length] * 2


@pytest.mark.parametrize("bin", [1, 500, "dense"])
@pytest.mark.parametrize("codec", ["rice", "paper"])
@STRATEGIES
@on_learners(2, 4)
def test_no_message_is_longer_than_the_longest(strategy, codec, bin):
    """With bins of 1 all elements are selected; the same gradients everywhere make the largest sums; one bucket has all."""
    model = make(bucket_cap_mb=100)
    hook = attach(model, strategy=strategy, codec=codec, conv=bin, matrix=bin, vector=bin, min_elements=0)
    transport, lengths = hook._runtime.transport, []
    start = transport._start

    def record(messages, *arguments):
        lengths.extend(map(len, messages))
        start(messages, *arguments)

    transport._start = record
    for step in range(2):
        images, labels = batch(step, learner=0)
        cross_entropy(model(images), labels).backward()
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert 0 < max(lengths) <= transport.longest_message < 1.1 * dense


def test_the_longest_message_follows_from_the_layout():
    assert longest_message([1000], ["dense"], 2) < 4000 + 200
    # One bin is one owner's, with two bits for each of 128 levels.
    assert 128 * 500 // 4 <= longest_message([500], [500], 128) < 128 * 500 // 4 + 1000
    # Many bins are shared.
    assert longest_message([500_000], [500], 128) < 4 * 500_000 + 1000
    assert longest_message([2**30 - 1] * 4, ["dense"] * 4, 2) == 2**32 - 1
