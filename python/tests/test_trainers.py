"""Trainers keep what a hook keeps: through checkpoints, and from one training to the next."""

import gc

import pytest
import torch
import torch.distributed as dist
from learners import on_learners
from torch import nn
from torch.nn.functional import cross_entropy
from training import Net, attach, batch, logged, make, residual_mean, train

from adacomp.torch import AdaCompState, Config, adacomp_hook, trainers


@on_learners(2)
def test_accelerate_keeps_one_copy_for_all(tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = make()
    hook = attach(model)
    train(model, 4)
    accelerator.register_for_checkpointing(hook)
    with pytest.raises(RuntimeError, match=r"register_for_checkpointing\(hook.consolidated\)"):
        accelerator.save_state(str(tmp_path / "wrong"))
    accelerator.free_memory()
    accelerator._custom_objects.clear()
    accelerator.register_for_checkpointing(hook.consolidated)
    accelerator.save_state(str(tmp_path / "right"))
    kept = residual_mean(model, hook)
    train(model, 2)
    accelerator.load_state(str(tmp_path / "right"))
    assert kept.any() and torch.allclose(kept, residual_mean(model, hook), rtol=1e-5, atol=1e-8)


class Losses(nn.Module):
    """As the trainer wants it."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, images, labels):
        return {"loss": cross_entropy(self.net(images), labels)}


@on_learners(2)
def test_hugging_face_trainer_goes_on(tmp_path):
    """A second training goes on with the residuals of the first, and a resumed one with those that were saved."""
    from transformers import Trainer, TrainingArguments

    from adacomp.torch.huggingface import AdaCompCallback

    images, labels = zip(*(batch(step, size=1, learner=0) for step in range(24)))
    data = [{"images": image[0], "labels": label[0]} for image, label in zip(images, labels)]

    def trainer_for(steps):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=3, per_device_train_batch_size=4, logging_steps=2, learning_rate=0.05,
            optim="sgd", report_to="none", use_cpu=True, ddp_backend="gloo", disable_tqdm=True, ddp_find_unused_parameters=False,
            # As people write it, to go on from the last checkpoint.
            resume_from_checkpoint=True,
        )  # fmt: skip
        torch.manual_seed(0)
        trainer = Trainer(Losses(), arguments, train_dataset=data)
        callback = AdaCompCallback(trainer, mode="on", timeout=30)
        assert callback.hook is None
        trainer.add_callback(callback)
        return trainer, callback

    def residuals(callback):
        state = callback.hook.state_dict(consolidate=True)
        return torch.cat([values.flatten() for key, values in state.items() if "residual." in key])

    trainer, callback = trainer_for(6)
    trainer.train()
    assert callback.hook.stats()["steps"]["compressed"] == 6
    logged_steps = [entry["step"] for entry in trainer.state.log_history if "adacomp/compression_ratio" in entry]
    assert logged_steps == [2, 4, 6]
    kept, weights = residuals(callback), trainer.model.net.fc1.weight.detach().clone()

    resumed, again = trainer_for(6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.hook.stats()["steps"]["compressed"] == 3
    assert torch.equal(weights, resumed.model.net.fc1.weight) and torch.equal(kept, residuals(again))

    begun = []
    callback.on_step_begin = lambda *_, **__: begun.append(residuals(callback))
    trainer.train()
    assert kept.any() and torch.allclose(begun[0], kept, rtol=1e-6), "the second training began with other residuals"
    assert callback.hook.stats()["steps"]["compressed"] in (6, 12)


@on_learners(2)
def test_states_of_another_number_of_learners_are_replaced(tmp_path):
    model = make()
    hook = attach(model)
    train(model, 2)
    if dist.get_rank() == 0:
        (tmp_path / "adacomp-00003-of-00004.pt").touch()
    dist.barrier()
    trainers.save(hook, tmp_path)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"adacomp-{learner:05}-of-00002.pt" for learner in range(2)]


@on_learners(2)
def test_a_state_that_is_never_called_says_so():
    """As Accelerate, and Lightning on processors, leave hooks out."""
    with logged() as lines:
        state = AdaCompState(Config(mode="on"))
        del state
        gc.collect()
        assert len(lines) == 1 and "never called, so gradients travel dense" in lines[0]
        # Bound, but registered by nobody: after some steps.
        model = make()
        state = AdaCompState(Config(mode="on", timeout=30))
        state.bind(model)
        lines.clear()
        train(model, 3)
        assert not lines
        train(model, 2)
        assert len(lines) == 1 and "never called" in lines[0]
        lines.clear()
        del state
        gc.collect()
        assert not lines
        # All is well.
        model = make()
        state = AdaCompState(Config(mode="on", timeout=30))
        state.bind(model)
        model.register_comm_hook(state, adacomp_hook)
        lines.clear()
        train(model, 5)
        assert not lines and not model._forward_pre_hooks
