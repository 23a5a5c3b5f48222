"""A bound on what one learner can do to the average."""

import pytest
import torch
import torch.distributed as dist
from learners import on_learners
from torch.nn.functional import cross_entropy
from training import PATHS, STRATEGIES, assert_conserved, attach, batch, everywhere, gradient, local_gradient, make, submit

from adacomp.torch import Config


@PATHS
@STRATEGIES
@on_learners(3)
def test_one_learner_cannot_set_the_average(strategy, in_place):
    """One of three sends a million times too much: no element of the average is above three times what the others have."""
    model = make()
    attach(model, in_place, strategy=strategy, clip=3.0)
    images, labels = batch(0)
    honest = [float(own.abs().max()) for own in everywhere(local_gradient(model, images, labels))[:2]]
    factor = 1e6 if dist.get_rank() == 2 else 1.0
    (factor * cross_entropy(model(images), labels)).backward()
    averaged = gradient(model)
    assert all(torch.equal(other, averaged) for other in everywhere(averaged))
    assert 0 < averaged.abs().max() <= 3 * max(honest)


@PATHS
@STRATEGIES
@on_learners(3)
def test_what_is_clipped_is_kept(strategy, in_place):
    """At the tightest bound the learners above the median are clipped in every step, and what does not count waits."""
    model = make()
    hook = attach(model, in_place, strategy=strategy, clip=1.0, vector=10, min_elements=1)
    given, received = submit(model, 6)
    assert_conserved(model, hook, given, received)


def test_wrong_options():
    with pytest.raises(ValueError, match="clip 0.5; expected a number from 1 on"):
        Config(mode="on", clip=0.5)
    with pytest.raises(ValueError, match='clip needs mode="on"'):
        Config(clip=3.0)
