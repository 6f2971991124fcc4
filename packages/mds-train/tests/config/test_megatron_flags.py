"""Each of Megatron's flags does what the table says; the list below is checked to be complete."""

from __future__ import annotations

import logging

import pytest

from mds_train.config import TrainConfig
from mds_train.config.fields import field_table
from mds_train.config.loading import Setting
from mds_train.config.megatron_flags import OLD_FLAGS, resolve_old_flags, take_old_flags
from mds_train.config.megatron_kinds import Derived, Ignored, Many, Only, Refused, Switch, Value
from mds_train.errors import UsageError

SETS = {
    "--num-layers 4": {"model.num_layers": 4},
    "--encoder-num-layers 4": {"model.num_layers": 4},
    "--decoder-num-layers 3": {"model.decoder_num_layers": 3},
    "--bert-no-binary-head": {"model.binary_head": False},
    "--reset-position-ids": {"data.reset_position_ids": True},
    "--reset-attention-mask": {"data.reset_attention_mask": True},
    "--eod-mask-loss": {"data.eod_mask_loss": True},
    "--apply-residual-connection-post-layernorm": {"model.residual_post_layernorm": True},
    "--hidden-size 64": {"model.hidden_size": 64},
    "--ffn-hidden-size 256": {"model.ffn_hidden_size": 256},
    "--num-attention-heads 8": {"model.num_attention_heads": 8},
    "--num-key-value-heads 2": {"model.num_key_value_heads": 2},
    "--num-query-groups 2": {"model.num_key_value_heads": 2},
    "--kv-channels 16": {"model.head_dim": 16},
    "--vocab-size 8192": {"model.vocab_size": 8192},
    "--max-position-embeddings 128": {"model.max_position_embeddings": 128},
    "--make-vocab-size-divisible-by 64": {"model.make_vocab_size_divisible_by": 64},
    "--layernorm-epsilon 1e-6": {"model.norm_epsilon": 1e-6},
    "--norm-epsilon 1e-6": {"model.norm_epsilon": 1e-6},
    "--normalization RMSNorm": {"model.normalization": "rmsnorm"},
    "--normalization layernorm": {"model.normalization": "layernorm"},
    "--rotary-position-embeddings-theta 500000": {"model.rope_theta": 500000.0},
    "--rotary-base 500000": {"model.rope_theta": 500000.0},
    "--rotary-percent 0.5": {"model.rope_percent": 0.5},
    "--init-method-std 0.01": {"model.init_std": 0.01},
    "--hidden-dropout 0.1": {"model.hidden_dropout": 0.1},
    "--attention-dropout 0.1": {"model.attention_dropout": 0.1},
    "--use-rotary-position-embeddings": {"model.position_embedding": "rope"},
    "--no-position-embedding": {"model.position_embedding": "none"},
    "--position-embedding-type learned_absolute": {"model.position_embedding": "learned"},
    "--untie-embeddings-and-output-weights": {"model.tie_embeddings": False},
    "--disable-bias-linear": {"model.add_bias": False},
    "--add-qkv-bias": {"model.add_qkv_bias": True},
    "--qk-layernorm": {"model.qk_norm": True},
    "--swiglu": {"model.activation": "swiglu"},
    "--squared-relu": {"model.activation": "relu2"},
    "--openai-gelu": {"model.activation": "gelu_tanh"},
    "--apply-layernorm-1p": {"model.zero_centered_norm": True},
    "--apply-layernorm-1p-bias": {"model.zero_centered_norm": True},
    "--num-experts 8": {"model.num_experts": 8},
    "--num-experts 1": {"model.num_experts": None},
    "--num-experts 2 2 2 2 2 2 4 4 4 4 4 4 2 2 2 2 2 2 2 2 2 2 2 16": {
        "model.num_experts": None,
        "model.layer_experts": (2,) * 6 + (4,) * 6 + (2,) * 11 + (16,),
    },
    "--moe-expert-parallel-size 2": {"parallel.ep_size": 2},
    "--expert-interval 2": {"model.expert_interval": 2},
    "--topk 2": {"model.moe_topk": 2},
    "--disable-moe-top2-2nd-expert-sampling": {"model.moe_sample_second": False},
    "--mlp-type residual": {"model.moe_residual": True},
    "--mlp-type standard": {"model.moe_residual": False},
    "--moe-loss-coeff 0.1": {"model.moe_loss_coeff": 0.1},
    "--moe-train-capacity-factor 1.25": {"model.moe_capacity_factor": 1.25},
    "--moe-eval-capacity-factor 2": {"model.moe_eval_capacity_factor": 2.0},
    "--moe-min-capacity 8": {"model.moe_min_capacity": 8},
    "--disable-moe-token-dropping": {
        "model.moe_capacity_factor": None,
        "model.moe_eval_capacity_factor": None,
    },
    "--enable-expert-tensor-parallelism": {"parallel.expert_tensor_parallel": True},
    "--legacy-vocab-softmax": {"model.legacy_vocab_softmax": True},
    "--micro-batch-size 4": {"train.micro_batch_size": 4},
    "--batch-size 4": {"train.micro_batch_size": 4},
    "--global-batch-size 32": {"train.global_batch_size": 32},
    "--train-iters 100": {"train.train_steps": 100},
    "--train-samples 3200": {"train.train_steps": 100},
    "--seed 7": {"train.seed": 7},
    "--clip-grad 0.5": {"train.gradient_clipping": 0.5},
    "--bf16": {"train.precision": "bf16"},
    "--fp16": {"train.precision": "fp16"},
    "--loss-scale 128": {"fp16.loss_scale": 128.0},
    "--initial-loss-scale 4096": {"fp16.initial_scale": 4096.0},
    "--min-loss-scale 2": {"fp16.min_scale": 2.0},
    "--loss-scale-window 500": {"fp16.window": 500},
    "--hysteresis 3": {"fp16.hysteresis": 3},
    "--optimizer adam": {"optimizer.name": "adamw"},
    "--optimizer sgd": {"optimizer.name": "sgd"},
    "--sgd-momentum 0.8": {"optimizer.momentum": 0.8},
    "--lr 1e-4": {"optimizer.lr": 1e-4},
    "--adam-beta1 0.8": {"optimizer.beta1": 0.8},
    "--adam-beta2 0.99": {"optimizer.beta2": 0.99},
    "--adam-eps 1e-7": {"optimizer.eps": 1e-7},
    "--weight-decay 0.01": {"optimizer.weight_decay": 0.01},
    "--start-weight-decay 0.01": {"optimizer.weight_decay": 0.01},
    "--end-weight-decay 0.1": {"schedule.end_weight_decay": 0.1},
    "--weight-decay-incr-style cosine": {"schedule.weight_decay_style": "cosine"},
    "--weight-decay-incr-style constant": {"schedule.weight_decay_style": "linear"},
    "--min-lr 1e-5": {"schedule.min_lr": 1e-5},
    "--lr-decay-style cosine": {"schedule.kind": "cosine"},
    "--lr-decay-style WSD": {"schedule.kind": "wsd"},
    "--lr-warmup-iters 10": {"schedule.warmup_steps": 10},
    "--lr-warmup-init 1e-6": {"schedule.warmup_init": 1e-6},
    "--lr-decay-iters 90": {"schedule.decay_steps": 90},
    "--lr-wsd-decay-iters 20": {"schedule.wsd_decay_steps": 20},
    "--lr-wsd-decay-style cosine": {"schedule.wsd_decay_style": "cosine"},
    "--lr-warmup-fraction 0.05": {"schedule.warmup_steps": 50},
    "--warmup 0.05": {"schedule.warmup_steps": 50},
    "--lr-warmup-samples 320": {"schedule.warmup_steps": 10},
    "--lr-warmup-samples 0": {"schedule.warmup_steps": 0},
    "--lr-decay-samples 3200": {"schedule.decay_steps": 100},
    "--legacy-lr-by-samples": {"schedule.by_samples": True},
    "--override-opt_param-scheduler": {"schedule.override": True},
    "--tensor-model-parallel-size 2": {"parallel.tp_size": 2},
    "--model-parallel-size 2": {"parallel.tp_size": 2},
    "--pipeline-model-parallel-size 2": {"parallel.pp_size": 2},
    "--pipeline-model-parallel-split-rank 1": {"parallel.split_rank": 1},
    "--num-layers-per-virtual-pipeline-stage 2": {"parallel.virtual_stages": 3},
    "--enable-zbh1-pipeline": {"parallel.schedule": "zb-h1"},
    "--enable-zbh1-exact-semantics": {"parallel.schedule": "zb-h1"},
    "--pp-partition-method type:transformer": {"parallel.partition": "layers"},
    "--pp-partition-method parameters": {"parallel.partition": "parameters"},
    "--ds-sequence-parallel-fpdt": {"memory.sequence_chunk": 65536},
    "--ds-sequence-parallel-fpdt-chunk-size 4096": {"memory.sequence_chunk": 4096},
    "--ds-sequence-parallel-fpdt-offloading": {"memory.offload_activations": True},
    "--ds-sequence-parallel-size 2": {"parallel.ulysses_size": 2},
    "--sequence-parallel": {"parallel.sequence_parallel": True},
    "--checkpoint-activations": {"memory.recompute": "full"},
    "--cpu-optimizer": {
        "memory.offload_optimizer": "cpu",
        "optimizer.implementation": "deepspeed-cpu",
    },
    "--cpu-torch-adam": {"optimizer.implementation": "torch"},
    "--remote-device cpu": {"memory.offload_parameters": "cpu"},
    "--deepspeed-config ds.json": {"engine.deepspeed_config": "ds.json"},
    "--checkpoint-in-cpu": {"memory.offload_activations": True},
    "--recompute-activations": {"memory.recompute": "selective"},
    "--recompute-granularity full": {"memory.recompute": "full"},
    "--recompute-num-layers 2": {"memory.recompute_layers": 2},
    "--checkpoint-num-layers 2": {"memory.recompute_layers": 2},
    "--zero-stage 2": {"parallel.zero_stage": 2},
    "--zero-stage 1.0": {"parallel.zero_stage": 1},
    "--distributed-timeout-minutes 10": {"parallel.timeout_seconds": 600.0},
    "--use-distributed-optimizer": {"parallel.zero_stage": 1},
    "--data-path store": {"data.store": "store", "data.stores": (), "data.weights": ()},
    "--data-path 1 store": {"data.store": "store", "data.stores": (), "data.weights": ()},
    "--data-path 0.3 a 0.7 b": {
        "data.store": None,
        "data.stores": ("a", "b"),
        "data.weights": (0.3, 0.7),
    },
    "--train-data-path a b": {"data.store": None, "data.stores": ("a", "b"), "data.weights": ()},
    "--valid-data-path v": {"data.valid_stores": ("v",), "data.valid_weights": ()},
    "--valid-data-path 2 v 1 w": {
        "data.valid_stores": ("v", "w"),
        "data.valid_weights": (2.0, 1.0),
    },
    "--rampup-batch-size 8 8 640": {"train.rampup_batch_size": (8, 8, 640)},
    "--exit-interval 100": {"train.exit_interval": 100},
    "--exit-duration-in-mins 350": {"train.exit_minutes": 350.0},
    "--kill-switch-file stop": {"train.kill_switch_file": "stop"},
    "--skip-train": {"train.skip_train": True},
    "--async-save": {"checkpoint.async_save": True},
    "--backup other": {"checkpoint.backup": "other"},
    "--from-scratch-if-missing": {"checkpoint.from_scratch_if_missing": True},
    "--train-tokens 204800": {"train.train_steps": 100},
    "--lr-warmup-tokens 20480": {"schedule.warmup_steps": 10},
    "--lr-decay-tokens 204800": {"schedule.decay_steps": 100},
    "--split 969,30,1": {"data.split": "969,30,1"},
    "--seq-length 1024": {"data.seq_length": 1024},
    "--encoder-seq-length 1024": {"data.seq_length": 1024},
    "--decoder-seq-length 128": {"data.decoder_seq_length": 128},
    "--mask-prob 0.2": {"data.mask_probability": 0.2},
    "--short-seq-prob 0.2": {"data.short_probability": 0.2},
    "--num-workers 2": {"data.workers": 2},
    "--save runs/x": {"train.run_dir": "runs/x"},
    "--load runs/x": {"checkpoint.load": "runs/x"},
    "--load-teacher runs/large": {"distill.teacher": "runs/large"},
    "--kd-alpha-ce 1": {"distill.alpha": 1.0},
    "--kd-beta-ce 0.5": {"distill.beta": 0.5},
    "--kd-temp 2": {"distill.temperature": 2.0},
    "--save-interval 100": {"checkpoint.save_interval": 100},
    "--finetune": {"checkpoint.load_weights_only": True},
    "--no-load-optim": {"checkpoint.load_weights_only": True},
    "--timing-log-level 0": {"watch.timers": False},
    "--timing-log-level 2": {"watch.timers": True},
    "--wandb-project gpt": {"watch.project": "gpt", "watch.trackers": ("wandb",)},
    "--wandb-exp-name first": {"watch.run_name": "first"},
    "--profile-steps 2,3": {"watch.profile_steps": (2, 3)},
    "--profile-ranks 0 1": {"watch.profile_ranks": (0, 1)},
    "--log-interval 5": {"watch.log_interval": 5},
    "--eval-interval 50": {"watch.eval_interval": 50},
    "--eval-iters 10": {"watch.eval_samples": 320},
}

GIVEN = {
    "train.global_batch_size": Setting(value=32, origin="file"),
    "train.train_steps": Setting(value=1000, origin="file"),
    "data.seq_length": Setting(value=64, origin="file"),
    "model.num_layers": Setting(value=24, origin="file"),
    "parallel.pp_size": Setting(value=4, origin="file"),
}


@pytest.mark.parametrize("typed", SETS)
def test_a_flag_sets_its_field(typed: str) -> None:
    old, rest = take_old_flags(typed.split())

    merged = resolve_old_flags(old, settings={**GIVEN, **old.settings})

    changed = {key: item.value for key, item in merged.items() if merged[key] != GIVEN.get(key)}
    assert changed == SETS[typed]
    assert all(type(changed[key]) is type(SETS[typed][key]) for key in changed)
    assert rest == []


@pytest.mark.parametrize("key", sorted({key for sets in SETS.values() for key in sets}))
def test_the_fields_that_flags_set_exist(key: str) -> None:
    assert key in field_table(TrainConfig)


def test_every_flag_that_sets_a_field_is_tested_above() -> None:
    setting = [flag for flag in OLD_FLAGS if isinstance(flag, (Value, Switch, Derived, Many))]

    assert {name for flag in setting for name in flag.names} == {typed.split()[0] for typed in SETS}


@pytest.mark.parametrize(
    ("name", "flag"),
    [(name, flag) for flag in OLD_FLAGS if isinstance(flag, Ignored) for name in flag.names],
)
def test_a_flag_that_does_nothing_says_why(
    name: str, flag: Ignored, caplog: pytest.LogCaptureFixture
) -> None:
    typed = [name, "3"] if flag.takes_value else [name]
    with caplog.at_level(logging.WARNING):
        old, rest = take_old_flags([*typed, "--parallel.tp-size", "2"])

    assert f"{name} does nothing here: {flag.reason}." in caplog.messages
    assert dict(old.settings) == {}
    assert rest == ["--parallel.tp-size", "2"]


@pytest.mark.parametrize(
    ("name", "flag"),
    [(name, flag) for flag in OLD_FLAGS if isinstance(flag, Refused) for name in flag.names],
)
def test_a_flag_that_is_not_taken_over_says_what_to_write(name: str, flag: Refused) -> None:
    with pytest.raises(UsageError, match=f"^{name} is not taken over: ") as caught:
        take_old_flags([name, "3"])

    assert flag.instead in str(caught.value)


@pytest.mark.parametrize(
    ("name", "flag"),
    [(name, flag) for flag in OLD_FLAGS if isinstance(flag, Only) for name in flag.names],
)
def test_a_flag_of_one_value_takes_that_and_says_what_to_write_for_others(
    name: str, flag: Only
) -> None:
    old, rest = take_old_flags([name, flag.allowed[0]])

    assert (dict(old.settings), rest) == ({}, [])
    with pytest.raises(UsageError, match=f"only '{flag.allowed[0]}' is taken over; ") as caught:
        take_old_flags([name, "block"])
    assert flag.instead in str(caught.value)


def test_no_name_stands_twice_and_underscores_are_dashes() -> None:
    names = [name.replace("_", "-") for flag in OLD_FLAGS for name in flag.names]
    assert len(names) == len(set(names))

    old, _ = take_old_flags(["--num_layers=3"])

    assert old.settings["model.num_layers"].value == 3
    assert old.settings["model.num_layers"].origin == "command line --num_layers"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--num-layers two", "'two', but model.num_layers must be a whole number"),
        ("--num-layers", "--num-layers takes one value, but none follows"),
        ("--swiglu 3", "--swiglu takes no value, but 1 follow"),
        ("--data-path 0.5 a 0.5", "one path is missing"),
        ("--rampup-batch-size 8 8", "takes three whole numbers"),
        ("--fp16 --bf16", "--fp16 and --bf16 contradict each other"),
        ("--position-embedding-type relative", "must be 'learned' or 'rope'"),
        ("--eval-iters many", "must be a number"),
        ("--mlp-type moe", "must be standard or residual"),
        ("--num-experts", "must be a number"),
        ("--pp-partition-method type:embed", "only uniform, type:transformer, parameters are"),
    ],
)
def test_a_wrong_value_is_a_usage_error(typed: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        take_old_flags(typed.split())


@pytest.mark.parametrize(
    ("stronger", "weaker", "key"),
    [
        ("--use-rotary-position-embeddings", "--no-position-embedding", "model.position_embedding"),
        ("--position-embedding-type rope", "--no-position-embedding", "model.position_embedding"),
        ("--cpu-torch-adam", "--cpu-optimizer", "optimizer.implementation"),
        ("--zero-stage 3", "--use-distributed-optimizer", "parallel.zero_stage"),
        (
            "--disable-moe-token-dropping",
            "--moe-train-capacity-factor 1.5",
            "model.moe_capacity_factor",
        ),
        (
            "--ds-sequence-parallel-fpdt-chunk-size 4096",
            "--ds-sequence-parallel-fpdt",
            "memory.sequence_chunk",
        ),
    ],
)
def test_where_the_original_reads_two_flags_together_their_order_does_not_count(
    stronger: str, weaker: str, key: str
) -> None:
    alone, _ = take_old_flags(stronger.split())

    for line in (f"{stronger} {weaker}", f"{weaker} {stronger}"):
        both, _ = take_old_flags(line.split())
        assert both.settings[key] == alone.settings[key], line


def test_a_flag_that_needs_another_setting_names_it() -> None:
    old, _ = take_old_flags(["--eval-iters", "10"])

    with pytest.raises(UsageError, match=r"--eval-iters needs train\.global_batch_size"):
        resolve_old_flags(old, settings={})


@pytest.mark.parametrize("layers", ["5", "0"])
def test_virtual_stages_that_do_not_share_out_the_layers_are_refused(layers: str) -> None:
    old, _ = take_old_flags(["--num-layers-per-virtual-pipeline-stage", layers])

    with pytest.raises(UsageError, match="do not divide model"):
        resolve_old_flags(old, settings=GIVEN)


def test_experts_of_every_second_layer_are_named_one_by_one() -> None:
    typed = "--num-experts 2 4 --num-layers 4 --expert-interval 2"
    old, _ = take_old_flags(typed.split())

    merged = resolve_old_flags(old, settings=old.settings)

    assert merged["model.layer_experts"].value == (0, 2, 0, 4)
    with pytest.raises(UsageError, match=r"names 2 layers, but with model\.expert_interval 1"):
        resolve_old_flags(old, settings=GIVEN)


def test_flags_that_depend_on_others_use_those_of_the_same_command_line() -> None:
    old, _ = take_old_flags(["--eval-iters", "10", "--global-batch-size", "4"])

    merged = resolve_old_flags(old, settings={**GIVEN, **old.settings})

    assert merged["watch.eval_samples"].value == 40


def test_a_growing_batch_takes_more_steps_for_the_same_samples() -> None:
    typed = "--train-samples 3200 --lr-warmup-samples 64 --rampup-batch-size 16 16 64"
    old, _ = take_old_flags(typed.split())

    merged = resolve_old_flags(old, settings={**GIVEN, **old.settings})

    # 16, 16, 16, 16 and another 16 (64 are not yet more than 64), then 32 each.
    assert merged["train.train_steps"].value == 5 + (3200 - 80) // 32
    assert merged["schedule.warmup_steps"].value == 4


def test_of_samples_and_tokens_the_shorter_run_counts() -> None:
    for typed in (
        "--train-samples 6400 --train-tokens 204800",
        "--train-tokens 204800 --train-samples 6400",
    ):
        old, _ = take_old_flags(typed.split())
        merged = resolve_old_flags(old, settings={**GIVEN, **old.settings})
        assert merged["train.train_steps"].value == 100


def test_a_share_of_the_run_is_taken_when_its_length_is_known() -> None:
    old, _ = take_old_flags(["--lr-warmup-fraction", "0.1", "--train-samples", "3200"])
    given = {key: value for key, value in GIVEN.items() if key != "train.train_steps"}

    assert resolve_old_flags(old, settings=given)["schedule.warmup_steps"].value == 10
