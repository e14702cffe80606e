"""`--optimizer module.Class`: arguments, resuming, a sentence for each class that does not work."""

import argparse

import pytest
import torch
from conftest import copy_state

from diffusion_training.training.step.optimizers import make_optimizer


class Counting(torch.optim.Optimizer):
    """Keeps the number of its steps where no checkpoint has it."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data -= group["lr"] / self.steps * weight.grad


class Keeping(torch.optim.SGD):
    """Its state has an object that a checkpoint can't hold."""

    def step(self, closure=None):
        super().step()
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["kept"] = argparse.Namespace(a=1)


class Switching(torch.optim.SGD):
    def eval(self):
        pass


def make(name, words=None, lr=1e-2):
    torch.manual_seed(0)
    models = {"unet": torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))}
    models["unet"][1].requires_grad_(False)
    args = argparse.Namespace(optimizer=name, optimizer_args=words, learning_rate=lr)
    args.adam_weight_decay = 0.1
    return models["unet"], make_optimizer(models, args)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        for weight in model[0].parameters():
            weight.grad = torch.randn_like(weight)
        optimizer.step()


def test_a_class_gets_its_arguments_and_goes_on_with_the_same_bits():
    words = ["betas=0.8,0.95", "weight_decay=0.02", "decoupled_weight_decay=True"]
    model, optimizer = make("torch.optim.RAdam", words)
    assert type(optimizer) is torch.optim.RAdam
    (group,) = optimizer.param_groups
    assert group["betas"] == (0.8, 0.95) and group["lr"] == 1e-2
    assert group["weight_decay"] == 0.02 and group["decoupled_weight_decay"] is True
    assert len(group["params"]) == 2  # nothing of the frozen layer
    train(model, optimizer, range(8))
    other, resumed = make("torch.optim.RAdam", words)
    other.load_state_dict(model.state_dict())
    copy_state(optimizer, resumed)
    train(model, optimizer, range(8, 11))
    train(other, resumed, range(8, 11))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_resumed_run_takes_the_arguments_that_it_gives_and_no_others():
    model, optimizer = make("torch.optim.SGD", ["momentum=0.9", "dampening=0.1"])
    train(model, optimizer, range(2))
    _, resumed = make("torch.optim.SGD", ["momentum=0.5"], lr=0.1)
    copy_state(optimizer, resumed)
    (group,) = resumed.param_groups
    assert (group["lr"], group["momentum"], group["dampening"]) == (0.1, 0.5, 0.1)


@pytest.mark.parametrize("name, words, reason", [
    ("no_such.Class", None, "can't be imported.*No module named 'no_such'"),
    ("torch.optim.Adom", None, "can't be imported.*no attribute 'Adom'"),
    ("torch.nn.Linear", None, "is no optimizer of torch's form"),
    ("torch.optim.SGD", ["momentun=0.9"], "can't be used with .*'momentun'"),
    ("torch.optim.SGD", ["momentum=big"], r"can't be used with \{'momentum': 'big'\}"),
    ("torch.optim.SGD", ["lr=1"], "can't be used with .*multiple values for keyword argument 'lr'"),
    ("torch.optim.LBFGS", None, "can't be used with .*closure"),
    (f"{__name__}.Keeping", None, "keeps more than tensors, numbers and texts"),
    (f"{__name__}.Counting", None, "keeps more than it saves"),
    (f"{__name__}.Switching", None, "other weights for samples"),
])  # fmt: skip
def test_a_class_that_cannot_work_ends_in_a_sentence(name, words, reason):
    with pytest.raises(SystemExit, match=f"--optimizer {name}.*{reason}") as error:
        make(name, words)
    assert "\n" not in str(error.value)
