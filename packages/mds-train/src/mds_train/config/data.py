"""The [data] table: which tokens, cut how, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mds_train.config.checks import require_choice, require_not_negative, require_positive

__all__ = ["DataConfig", "Order", "Segments"]

Order = Literal["fast", "megatron"]
Segments = Literal["order", "next"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the tokens lie and how they become samples."""

    seq_length: int
    """Tokens of one sample; the model sees this many positions."""

    store: str | None = None
    """Folder of an mds-data store, or the prefix of a Megatron .bin/.idx pair."""

    stores: tuple[str, ...] = ()
    """Several of them in place of one: samples are mixed by `weights`."""

    weights: tuple[float, ...] = ()
    """Share of each of `stores`; by their sizes when left out. Only ratios count."""

    valid_stores: tuple[str, ...] = ()
    """Validate on these as a whole; the others are then trained on as a whole (no data.split)."""

    valid_weights: tuple[float, ...] = ()
    """Share of each of `valid_stores`; by their sizes when left out."""

    identity: str | None = None
    """File of the age identity that opens encrypted stores."""

    passphrase_file: str | None = None
    """File with the passphrase that opens them."""

    passphrase_variable: str | None = None
    """Name of the environment variable that holds their passphrase."""

    key_command: str | None = None
    """Program that unwraps the key of encrypted stores, such as the client of a key service."""

    split: str | None = None
    """Weights of train, validation and test, like "95,5,0"; the store's own when left out."""

    order: Order = "fast"
    """How samples are shuffled: "fast" (computed) or "megatron" (the original's order)."""

    workers: int = 0
    """Threads that read ahead while the model works; 0 reads when a batch is needed."""

    conversations: bool = False
    """Of a GPT: the store holds conversations (`mds-data preprocess-sft`); answers are learned,
    prompts only read."""

    packing: bool = True
    """Put several conversations into a sample; none sees another."""

    learn_prompts: bool = False
    """Learn the prompts of conversations too."""

    reset_attention_mask: bool = False
    """Of a GPT: a document does not see those before it in its sample."""

    reset_position_ids: bool = False
    """Of a GPT: positions begin at 0 in every document of a sample."""

    eod_mask_loss: bool = False
    """Of a GPT: nothing is learned from the token that ends a document."""

    decoder_seq_length: int | None = None
    """Of a T5: tokens that its decoder writes; its encoder reads seq_length."""

    pairs: bool = False
    """Of a T5: the store holds pairs of source and target (`mds-data preprocess-nmt`), which the
    encoder reads and the decoder writes; otherwise spans are cut out of texts."""

    segments: Segments | None = None
    """Of a BERT with a binary head: it tells whether two segments were swapped ("order", what is
    taken when left out) or are no neighbours ("next")."""

    mask_probability: float | None = None
    """Of a BERT or T5: share of the tokens that is to be predicted; 0.15 when left out."""

    short_probability: float | None = None
    """Of a BERT or T5: share of samples of a random, shorter length; 0.1 when left out."""

    tokenizer: str | None = None
    """Of a BERT or T5: the tokenizer's file (tokenizer.json, a SentencePiece model, or BERT's
    vocab.txt) where the stores keep none, as a Megatron pair; its marks and words are needed."""

    curriculum_start_length: int | None = None
    """Cut the first samples to this length, which grows to seq_length over curriculum_steps."""

    curriculum_steps: int | None = None
    """Steps after which samples have their whole length."""

    curriculum_multiple: int = 8
    """Lengths on the way are multiples of this."""

    curriculum_root: int = 1
    """The length grows with this root of the step: 1 linearly, 2 faster at first."""

    def __post_init__(self) -> None:
        _check_stores(self)
        _check_curriculum(self)
        _check_documents(self)
        require_positive("data.seq_length", self.seq_length)
        require_choice("data.order", self.order, choices=("fast", "megatron"))
        require_not_negative("data.workers", self.workers)
        require_positive("data.decoder_seq_length", self.decoder_seq_length)
        for key in ("mask_probability", "short_probability"):
            _check_share(f"data.{key}", getattr(self, key))
        if self.split is not None:
            _check_split(self.split)

    @property
    def marks_documents(self) -> bool:
        """Whether samples say where their documents end, so that none sees another."""
        return self.reset_attention_mask or (self.conversations and self.packing)

    @property
    def tokens_of_sample(self) -> int:
        """Tokens that a model sees of a sample, those of a decoder counted."""
        return self.seq_length + (self.decoder_seq_length or 0)

    @property
    def paths(self) -> tuple[str, ...]:
        """The stores that are trained on."""
        return self.stores or ((self.store,) if self.store else ())


def _check_share(key: str, value: float | None) -> None:
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"{key} is {value}, but it must lie from 0 to 1.")


def _check_stores(data: DataConfig) -> None:
    if not data.paths:
        raise ValueError(
            "data.store is not set; write `store = ...` under [data] in the file, or --data.store "
            "on the command line (or several with stores)."
        )
    if data.store and data.stores:
        raise ValueError("data.store and data.stores are both set; keep one of them.")
    for key in ("", "valid_"):
        stores, weights = getattr(data, f"{key}stores"), getattr(data, f"{key}weights")
        if weights and len(weights) != len(stores):
            raise ValueError(
                f"data.{key}weights has {len(weights)} numbers for {len(stores)} data.{key}stores; "
                f"give each store one."
            )
        if weights and (min(weights) < 0 or sum(weights) <= 0):
            raise ValueError(f"data.{key}weights is {list(weights)}; one must be greater than 0.")


def _check_curriculum(data: DataConfig) -> None:
    start, steps, multiple = (
        data.curriculum_start_length,
        data.curriculum_steps,
        data.curriculum_multiple,
    )
    for key in ("start_length", "steps", "multiple", "root"):
        require_positive(f"data.curriculum_{key}", getattr(data, f"curriculum_{key}"))
    if (start is None) != (steps is None):
        raise ValueError(
            "data.curriculum_start_length and data.curriculum_steps belong together; set both."
        )
    if start is None:
        return
    if start > data.seq_length or start % multiple or data.seq_length % multiple:
        raise ValueError(
            f"data.curriculum_start_length {start} must not be longer than data.seq_length "
            f"{data.seq_length}, and both must be multiples of data.curriculum_multiple {multiple}."
        )


def _check_documents(data: DataConfig) -> None:
    resets = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    given = [f"data.{key}" for key in resets if getattr(data, key)]
    if data.conversations and given:
        raise ValueError(
            f"{', '.join(given)} and data.conversations are both set; conversations never see each "
            f"other and begin at position 0, so leave {', '.join(given)} out."
        )
    if data.learn_prompts and not data.conversations:
        raise ValueError("data.learn_prompts needs data.conversations; set both or neither.")
    if not data.packing and not data.conversations:
        raise ValueError("data.packing = false is about data.conversations; leave it out.")
    if data.marks_documents and data.curriculum_steps is not None:
        raise ValueError(
            "data.curriculum_steps cuts samples and does not go together with "
            "data.reset_attention_mask or packed data.conversations (data.packing); leave one out."
        )


def _check_split(split: str) -> None:
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(
            f"data.split is {split!r}, but it must be up to three weights for train, "
            f'validation and test, like "95,5,0".'
        )
