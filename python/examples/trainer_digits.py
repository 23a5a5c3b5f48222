"""Hugging Face's Trainer on several learners, with AdaComp: the callback attaches, logs, and saves.

torchrun --nproc-per-node 2 python/examples/trainer_digits.py
"""

import argparse
from pathlib import Path

import torch
from data import drawn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from adacomp.torch.huggingface import AdaCompCallback


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))

    def forward(self, images, labels):
        logits = self.net(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Digits(Dataset):
    def __init__(self, train):
        self.images, self.labels = drawn(train)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.labels[index]}


def test_error(prediction):
    return {"test_error": 100 * float((prediction.predictions.argmax(1) != prediction.label_ids).mean())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/trainer"), help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()

    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=50,
        learning_rate=0.05,
        optim="sgd",
        save_strategy="epoch",
        logging_steps=20,
        report_to="none",
        ddp_find_unused_parameters=False,
        ddp_backend=None if torch.cuda.is_available() else "gloo",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(Classifier(), arguments, train_dataset=Digits(True), eval_dataset=Digits(False), compute_metrics=test_error)
    callback = AdaCompCallback(trainer, mode=options.mode)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=options.resume)
    error = trainer.evaluate()["eval_test_error"]
    if trainer.is_world_process_zero():
        print(f"test error {error:.2f}%")
        print(callback.hook)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
