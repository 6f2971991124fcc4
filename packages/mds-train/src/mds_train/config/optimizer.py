"""The [optimizer] and [schedule] tables."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.checks import require_choice, require_not_negative, require_positive

__all__ = ["IMPLEMENTATIONS", "OPTIMIZERS", "SCHEDULES", "OptimizerConfig", "ScheduleConfig"]

OPTIMIZERS = ("adamw", "lion", "muon", "sgd")
IMPLEMENTATIONS = ("torch", "deepspeed-cpu")

SCHEDULES = ("constant", "linear", "cosine", "inverse-square-root", "wsd")
DECAY_STYLES = ("linear", "cosine", "exponential", "minus-sqrt")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """What turns gradients into updates. Biases and norms are not decayed."""

    name: str = "adamw"
    """"adamw", "lion", "sgd", or "muon" for the matrices of the layers and adamw for the rest."""

    implementation: str = "torch"
    """"torch", or "deepspeed-cpu": DeepSpeed's CPU Adam, compiled at its first use, for adamw on a
    CPU or with memory.offload_optimizer "cpu"."""

    lr: float = 3e-4
    """Highest learning rate, reached at the end of the warm-up."""

    beta1: float = 0.9
    """Decay of the first moment; for lion the share of its mean in a step."""

    beta2: float = 0.95
    """Decay of the second moment; for lion that of its mean."""

    eps: float = 1e-8
    """Added to the root of the second moment (adamw)."""

    momentum: float | None = None
    """Decay of the sum of gradients that sgd steps along (0.9 when left out; 0 keeps none), and of
    the mean that muon takes (0.95)."""

    weight_decay: float = 0.1
    """Weight decay of the matrices: decoupled, but for sgd a part of the gradient."""

    def __post_init__(self) -> None:
        require_choice("optimizer.name", self.name, choices=OPTIMIZERS)
        choices = IMPLEMENTATIONS
        require_choice("optimizer.implementation", self.implementation, choices=choices)
        if self.implementation != "torch" and self.name != "adamw":
            raise ValueError(
                f'optimizer.implementation "{self.implementation}" steps adamw, but optimizer.name '
                f'is "{self.name}"; use "torch".'
            )
        require_positive("optimizer.lr", self.lr)
        require_positive("optimizer.eps", self.eps)
        require_not_negative("optimizer.weight_decay", self.weight_decay)
        for key in ("beta1", "beta2", "momentum"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"optimizer.{key} is {value}, but it must be in [0, 1).")

    @property
    def usual_momentum(self) -> float:
        """The momentum, where it is left out the usual one of the optimizer."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.name == "muon" else 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How learning rate and weight decay follow the number of applied updates."""

    kind: str = "cosine"
    """"constant", "linear", "cosine", "inverse-square-root" or "wsd" (warm up, stay, decay)."""

    min_lr: float = 0.0
    """The learning rate never falls below this after the warm-up."""

    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from warmup_init."""

    warmup_init: float = 0.0
    """Learning rate before the first update, when there is a warm-up."""

    decay_steps: int | None = None
    """Update at which min_lr is reached; train.train_steps when left out."""

    wsd_decay_steps: int | None = None
    """Length of the last, falling part of "wsd"."""

    wsd_decay_style: str = "linear"
    """Form of that part: "linear", "cosine", "exponential" or "minus-sqrt"."""

    end_weight_decay: float | None = None
    """Weight decay moves to this by decay_steps; it stays as it is when left out."""

    weight_decay_style: str = "linear"
    """Form of that ramp: "linear" or "cosine"."""

    by_samples: bool = False
    """Follow the consumed samples, as the original does, instead of the applied updates: a growing
    batch then moves the schedule faster, and a skipped step moves it too."""

    override: bool = False
    """On resume, use this schedule though the checkpoint was made with another one."""

    def __post_init__(self) -> None:
        require_choice("schedule.kind", self.kind, choices=SCHEDULES)
        require_choice("schedule.wsd_decay_style", self.wsd_decay_style, choices=DECAY_STYLES)
        ramps = ("linear", "cosine")
        require_choice("schedule.weight_decay_style", self.weight_decay_style, choices=ramps)
        for key in ("min_lr", "warmup_steps", "warmup_init", "end_weight_decay"):
            require_not_negative(f"schedule.{key}", getattr(self, key))
        for key in ("decay_steps", "wsd_decay_steps"):
            require_positive(f"schedule.{key}", getattr(self, key))
        if self.kind == "wsd" and self.wsd_decay_steps is None:
            raise ValueError(
                'schedule.kind "wsd" needs schedule.wsd_decay_steps, for how long it falls.'
            )
