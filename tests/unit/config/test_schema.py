"""The rules of the schema: each impossible combination is refused and names what breaks it."""

from pathlib import Path
from typing import Any

import pytest

from rltrain.config import Config
from rltrain.config.errors import ConfigError, validate
from rltrain.config.reference import keys, markdown, show
from rltrain.config.reward import BUILT_IN_REWARDS
from rltrain.config.rollout import OTHER_DISTRIBUTIONS
from rltrain.config.saved_config import load_config, save_config, save_recipe
from rltrain.environments.rewards import BUILT_IN

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]


def nested(dotted: dict[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    values: dict[str, Any] = {}
    for name, value in dotted.items():
        *parents, leaf = name.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return values


JSONL: dict[str, Any] = {"data.source": "jsonl", "data.path": "x.jsonl"}
RIGHT: dict[str, Any] = {"data.reward.components": {"right": {"function": "exact"}}}

IMPOSSIBLE = [
    (
        {"checkpoint.keep_best": 2},
        "every=0 saves none",
        "the best are among those that are saved",
    ),
    (
        {"algorithm.group_size": 1, "algorithm.dynamic_sampling.max_rounds": 2},
        "group_size=1",
        "a group of one has no spread",
    ),
    ({"algorithm.kl.target": 0.1}, "coef=0", "a reference is built for its options"),
    ({"algorithm.kl.refresh_every": 4}, "coef=0", "a reference is built for its options"),
    (
        {
            "algorithm.kl.coef": 0.1,
            "algorithm.kl.where": "reward",
            "algorithm.kl.estimator": "k3_k2",
        },
        "estimator=k3_k2",
        "its gradient is that of a kl",
    ),
    (
        {"algorithm.kl.coef": 0.1, "algorithm.kl.estimator": "k1"},
        "use k2 or k3_k2",
        "its gradient is that of a kl",
    ),
    ({"algorithm.correction.weight_min": 2.0}, "weight_min=2.0", "bounds are in order"),
    ({"algorithm.correction.reject_max": 0.1}, "reject_max=0.1", "bounds are in order"),
    (
        {"algorithm.bypass_old_logprobs": True, "algorithm.correction.veto": 1e-4},
        "algorithm.correction",
        "correction needs the pass that measures",
    ),
    (
        {"checkpoint.every": 2, "trainer.sync_every": 4},
        "checkpoint.every=2",
        "checkpoints fall on weight syncs",
    ),
    (
        {"trainer.eval_every": 10, "trainer.sync_every": 4},
        "eval_every=8 or 12",
        "evaluations fall on weight syncs",
    ),
    (
        {"trainer.max_staleness": 1, "trainer.sync_every": 2},
        "use one of the two",
        "rollouts are stale for one reason",
    ),
    (
        {"trainer.max_staleness": 1, "cluster.placement": "colocated"},
        "use cluster.placement=disaggregated",
        "engines that run ahead share no gpu",
    ),
    (
        {"rollout.update_in_flight": True, "rollout.deterministic": True},
        "use update_in_flight=false",
        "an update in flight has no fixed place",
    ),
    (
        {"rollout.update_in_flight": True},
        "set trainer.max_staleness=1 or more",
        "updates in flight meet engines that run ahead",
    ),
    (
        {"routing_replay.mode": "r3", "routing_replay.max_age": 1},
        "set routing_replay.fallback to live or r2",
        "rows with older routes choose in some way",
    ),
    (
        {"routing_replay.mode": "r2", "routing_replay.min_gate_ratio": 0.5},
        "set routing_replay.mode=r3",
        "gates judge what is replayed",
    ),
    (
        {
            "routing_replay.mode": "r3",
            "routing_replay.min_gate_ratio": 0.5,
            "routing_replay.trace": True,
        },
        "use one of the two",
        "gates judge what is replayed",
    ),
    (
        {
            "routing_replay.mode": "r3",
            "routing_replay.min_gate_ratio": 0.5,
            "algorithm.bypass_old_logprobs": True,
        },
        "use min_gate_ratio=0",
        "what is recorded needs the pass that records",
    ),
    ({"rollout.stop": [""]}, "'' is in no text", "stop strings can appear"),
    ({"rollout.stop": ["a\ufffd"]}, "is in no text", "stop strings can appear"),
    ({"rollout.stop": ["a", "b", "a"]}, "stands there twice", "stop strings differ"),
    ({"optimizer.min_lr": 1.0, "optimizer.schedule": "linear"}, "min_lr=1.0", "min lr at most lr"),
    ({"optimizer.min_lr": 1e-9}, "schedule=constant", "a constant lr has no minimum"),
    (
        {"optimizer.freeze_router": True, "optimizer.router_lr": 1e-4},
        "router_lr",
        "a frozen router has no lr",
    ),
    ({"model.weights": "imported"}, "weights=imported", "weights need their path"),
    ({"data.source": "jsonl"}, "data.path", "file sources have a path"),
    ({"data.path": "x.jsonl"}, "path=x.jsonl", "generated sources read no file"),
    ({"data.eval_path": "x.jsonl"}, "eval_path=x.jsonl", "generated sources read no file"),
    ({"data.source": "reasoning_gym"}, "data.task", "reasoning gym names its task"),
    (
        {"data.reward.function": "exakt"},
        "expected one of exact",
        "the function is built in or in a file or module",
    ),
    ({"data.split": "test"}, "data.split", "only dataset folders have splits"),
    ({"data.name": "main"}, "name=main", "only dataset folders have configurations"),
    (
        {"data.tools_column": "tools"},
        "tools_column=tools",
        "generated rows are read as they are made",
    ),
    ({"data.last_turn": "drop"}, "last_turn=drop", "generated rows are read as they are made"),
    ({"data.answer_column": "prompt"}, "are both prompt", "the answer comes from somewhere"),
    ({"data.answer_column": None}, "without an answer", "the answer comes from somewhere"),
    (
        JSONL | {"data.answer_column": "gold", "data.last_turn": "answer"},
        "would ignore answer_column=gold",
        "the answer comes from somewhere",
    ),
    (
        JSONL | {"data.answer_pattern": "("},
        "no regular expression",
        "the answer pattern has one group at most",
    ),
    (
        JSONL | {"data.answer_pattern": "(a)(b)"},
        "has 2 groups",
        "the answer pattern has one group at most",
    ),
    (
        {"data.template_args": {"tools": []}},
        "data.tools_column",
        "template arguments are not ours",
    ),
    (
        JSONL | {"data.eval_path": "y", "data.eval_on_train": True},
        "would ignore eval_path",
        "one set is evaluated",
    ),
    (
        {"data.eval_size": 0, "data.eval_on_train": True},
        "eval_size=0 evaluates nothing",
        "one set is evaluated",
    ),
    (
        {"data.reward.components": {"right": {"function": "exakt"}}},
        "data.reward.components.right: function=exakt",
        "the function is built in or in a file or module",
    ),
    *[
        (
            {"data.reward.components": {name: {"function": "exact"}}},
            f"a component named {name!r}",
            "the name of a component is one of a metric",
        )
        for name in ("", "1st", "a/b", "länge", "reward", "correct")
    ],
    (
        {"data.reward.components": {f"c{n}": {"function": "exact"} for n in range(17)}},
        "expected at most 16 components, found 17",
        "the name of a component is one of a metric",
    ),
    (
        {"data.reward.function": "math_verify"} | RIGHT,
        "would ignore function=math_verify",
        "a reward is one function or its components",
    ),
    (
        {"data.reward.components": {"right": {"function": "exact", "weight": 0.0}}},
        "every weight is 0",
        "a reward is one function or its components",
    ),
    (
        {"data.reward.function": "http://me:word@judge/score"},
        "a URL with a login",
        "the function is built in or in a file or module",
    ),
    (
        {"data.reward.token_env": "JUDGE_TOKEN"},
        "no reward function is an http:// or https:// address",
        "a token is for a service",
    ),
    (
        {"data.reward.correct_from": "right"},
        "expected the name of a component (none)",
        "one component says what is correct",
    ),
    (
        {"data.reward.correct_from": "right", "data.reward.success_at": 0.5} | RIGHT,
        "or set components.right.success_at",
        "one component says what is correct",
    ),
    (
        {"data.answer_column": None} | JSONL | RIGHT,
        "leaves reward.components.right.function=exact without an answer",
        "the answer comes from somewhere",
    ),
    ({"model.tiny.num_kv_heads": 3}, "num_kv_heads=3", "kv heads divide heads"),
    (
        {"model.tiny.experts_per_token": 33},
        "num_experts=32",
        "experts per token at most num experts",
    ),
    ({"policy.parallel.ep": 2}, "ep*etp=2", "experts fit the ranks"),
    ({"policy.parallel.vpp": 2}, "vpp: pp=1 is a single stage", "one stage is not shared out"),
    (
        {"policy.dispatcher": "allgather", "policy.parallel.pp": 2},
        "dispatcher=allgather with pp=2",
        "equal lengths for allgather",
    ),
    (
        {"algorithm.loss": "gspo", "algorithm.dual_clip": 3.0},
        "loss=gspo would ignore dual_clip=3.0",
        "only ppo has a dual clip",
    ),
    (
        {"algorithm.loss": "pg", "algorithm.clip_high": 0.28},
        "loss=pg would ignore clip_high=0.28:",
        "plain policy gradient clips nothing",
    ),
    (
        {
            "algorithm.kl.coef": 0.1,
            "algorithm.kl.target": 0.1,
            "algorithm.kl.horizon": 6,
            "trainer.prompts_per_step": 5,
            "algorithm.group_size": 6,
        },
        "use a horizon above 6",
        "an adaptive kl stays positive",
    ),
    (
        {"rollout.deterministic": True, "rollout.oversample": 0.25},
        "oversample=0.25 keeps the groups that finish first",
        "what finishes first is not deterministic",
    ),
    (
        {"rollout.deterministic": True, "rollout.seeded": False},
        "only where every request has a seed",
        "deterministic requests have seeds",
    ),
    *[
        (
            {f"rollout.engine_args.{option}": value},
            f"engine_args.{option}: ",
            "engine args leave the distribution alone",
        )
        for option, value in OTHER_DISTRIBUTIONS.items()  # any value that is not empty
    ],
    (
        {
            "rollout.engine_args.speculative_config": {
                "method": "ngram",
                "rejection_sample_method": "synthetic",
            }
        },
        "rejection_sample_method=synthetic",
        "drafts are accepted by the policys odds",
    ),
    (
        {"rollout.engine_args.hf_overrides": {"rope_theta": 1e4}},
        "hf_overrides",
        "engine args leave our own alone",
    ),
    (
        {"rollout.expert_parallel": True},
        "over tensor_parallel ranks, found 1",
        "experts are shared out over ranks",
    ),
    (
        {"rollout.engine_args": {"data_parallel_size": 2}},
        "data_parallel_size=2: vLLM would answer for the first",
        "an engine has one copy of the weights",
    ),
    (
        {"rollout.quantization": "fp8", "rollout.dtype": "float32"},
        "found dtype=float32",
        "fp8 weights multiply in bf16",
    ),
    ({"rollout.engine_args": {"seed": 1}}, "seed", "engine args leave our own alone"),
    ({"routing_replay.mode": "r3", "routing_replay.capture": False}, "capture", "r3 needs capture"),
    ({"routing_replay.fallback": "live"}, "fallback=live", "only replayed rows fall back"),
    (
        {"routing_replay.mode": "r2", "routing_replay.fallback": "r2"},
        "mode=r2 replays none",
        "only replayed rows fall back",
    ),
    ({"algorithm.correction.reject": "k3"}, "reject_min=0.5", "k3 has no lower bound"),
    (
        {"algorithm.bypass_old_logprobs": True, "routing_replay.mode": "r2"},
        "mode=r2, fallback=error records the routes",
        "what is recorded needs the pass that records",
    ),
    (
        {
            "algorithm.bypass_old_logprobs": True,
            "routing_replay.mode": "r3",
            "routing_replay.fallback": "r2",
        },
        "mode=r3, fallback=r2 records the routes",
        "what is recorded needs the pass that records",
    ),
    ({"trainer.resume": "auto"}, "output_dir", "resuming needs a fixed folder"),
    ({"trainer.resume": "step:5"}, "resume=step:5 looks", "resuming needs a fixed folder"),
    ({"cluster.device": "cpu", "cluster.num_gpus": 1}, "num_gpus=1", "gpus are for cuda"),
    ({"cluster.interface": "eth0"}, "without cluster.address", "an interface is of a cluster"),
    ({"trainer.mini_batches": 3}, "trainer.mini_batches=3", "mini batches divide prompts"),
    (
        {"policy.parallel.dp": 3},
        "policy.parallel.dp=3",
        "every data parallel rank gets sequences",
    ),
    (
        {"algorithm.type": "sft", "policy.parallel.dp": 128},
        "the 64 sequences",
        "every data parallel rank gets sequences",
    ),
    (
        {"policy.max_tokens_per_micro_batch": 5119},
        "5120 = data.max_prompt_tokens + rollout.max_response_tokens",
        "a micro batch holds the longest sequence",
    ),
    (
        {"policy.max_tokens_per_scoring_micro_batch": 79},
        "policy.max_tokens_per_scoring_micro_batch=79",
        "a micro batch holds the longest sequence",
    ),
    (
        {"algorithm.type": "sft", "routing_replay.mode": "r3"},
        "routing_replay.mode=r3",
        "supervised steps use what is set",
    ),
    (
        {"trainer.steps": 5, "critic.warmup_steps": 5},
        "critic.warmup_steps=5 leaves the policy no update in trainer.steps=5",
        "a warm up of the critic ends",
    ),
    (
        {"routing_replay.reference": "replay", "routing_replay.mode": "r3"},
        "algorithm.kl.coef=0.0",
        "a replayed reference exists",
    ),
]


@pytest.mark.parametrize(("values", "named", "rule"), IMPOSSIBLE)
def test_an_impossible_combination_names_its_keys_and_the_rule(
    values: dict[str, Any], named: str, rule: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(nested(values))
    assert named in str(refused.value)
    assert f"(rule: {rule})" in str(refused.value)


def test_every_rule_of_the_schema_is_tested() -> None:
    def rules(section: Any) -> set[str]:
        own = set(section.__pydantic_decorators__.model_validators)
        for field in section.model_fields.values():
            if hasattr(field.annotation, "__pydantic_decorators__"):
                own |= rules(field.annotation)
        return own

    tested = {rule.replace(" ", "_") for _, _, rule in IMPOSSIBLE}
    assert rules(Config) == tested


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("trainer.steps", 0, "trainer.steps: expected integer > 0, found 0"),
        ("trainer.resume", "newest", "trainer.resume: expected never, auto or a step such as step"),
        (
            "trainer.resume",
            "step:0",
            "expected never, auto or a step such as step:20, found step:0",
        ),
        ("cluster.ports", [5, 4], "expected the first and the last port, found [5, 4]"),
        ("trainer.steps", True, "trainer.steps: expected integer > 0, found true"),
        ("trainer.steps", "5", "trainer.steps: expected integer > 0, found 5"),
        ("trainer.steps", None, "trainer.steps: expected integer > 0, found null"),
        ("optimizer.lr", float("inf"), "optimizer.lr: expected number > 0, found inf"),
        ("optimizer.lr", float("nan"), "optimizer.lr: expected number > 0, found nan"),
        ("optimizer.router_lr", -1.0, "optimizer.router_lr: expected number > 0 or null"),
        ("rollout.engine_args", 3, "rollout.engine_args: expected dictionary, found 3"),
        ("policy.parallel", 3, "policy.parallel: expected a section with keys of its own"),
        ("algorithm.type", "ppo", "algorithm.type: expected one of rl, sft, found ppo"),
        ("routing_replay.mode", False, 'write "off"'),
        ("tracking.name", 5, "tracking.name=\"'5'\""),
        ("trainer.stpes", 5, "trainer.stpes: there is no such key. Nearest: trainer.steps"),
        ("trainer.lr", 5, "trainer.lr: there is no such key. Nearest: optimizer.lr"),
        (
            "tracking.name",
            "a\ud800",
            "tracking.name: expected text that UTF-8 can write",
        ),
        ("cluster.env", {"A": ["\udc80"]}, "cluster.env.A: expected text that UTF-8 can write"),
    ],
)
def test_a_bad_value_names_its_key_and_what_was_expected(
    name: str, value: Any, expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(nested({name: value}))
    assert expected in str(refused.value)


def test_all_bad_values_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        validate(nested({"trainer.steps": 0, "optimizer.lr": 0, "trainer.x": 0}))
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == [
        "optimizer.lr",
        "trainer.steps",
        "trainer.x",
    ]


def test_the_rewards_that_may_be_named_are_those_that_exist() -> None:
    assert set(BUILT_IN_REWARDS) == BUILT_IN.keys()


def test_an_integer_will_do_for_a_number() -> None:
    assert validate(nested({"optimizer.lr": 1})).optimizer.lr == 1.0


def test_a_configuration_cannot_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().trainer.steps = 5  # type: ignore[misc]


def test_a_saved_configuration_loads_as_it_was(tmp_path: Path) -> None:
    values = {"trainer.output_dir": str(tmp_path), "optimizer.lr": 1e-7, "tracking.name": "off"}
    config = validate(nested(values))
    path = save_config(config, "python -m rltrain.main", ["+recipe=x"])
    assert path.read_text().startswith("# python -m rltrain.main +recipe=x\nmodel:\n")
    assert load_config(tmp_path) == config
    with pytest.raises(ValueError, match="expected the folder of a run"):
        load_config(tmp_path / "elsewhere")


def test_a_run_that_saved_removed_keys_loads(tmp_path: Path) -> None:
    path = save_config(validate(nested({"trainer.output_dir": str(tmp_path)})), "rl", [])
    saved = path.read_text()
    old = saved.replace("rollout:\n", "rollout:\n  top_p: 1.0\n  top_k: 0\n")
    path.write_text(old.replace("model:\n", "model:\n  bridge: false\n"))
    assert load_config(tmp_path) == validate(nested({"trainer.output_dir": str(tmp_path)}))
    path.write_text(saved.replace("rollout:\n", "rollout:\n  top_p: 0.9\n  top_k: 0\n"))
    with pytest.raises(ConfigError, match=r"rollout\.top_p: there is no such key\. Tokens"):
        load_config(tmp_path)
    path.write_text(saved.replace("model:\n", "model:\n  bridge: true\n"))
    with pytest.raises(ConfigError, match=r"model\.bridge: there is no such key"):
        load_config(tmp_path)
    old = saved.replace("  backends:\n  - wandb\n  wandb: auto\n", "  wandb: disabled\n")
    assert old != saved
    path.write_text(old)
    assert load_config(tmp_path).tracking.backends == []


@pytest.mark.parametrize(
    ("component", "said"),
    [
        (
            {"function": "exact", "wieght": 2},
            "wieght: there is no such key. Nearest: .*right.weight",
        ),
        ({"function": "exact", "weight": "2"}, "weight: expected number, found 2"),
        ({"function": "exact", "weight": float("inf")}, "weight: expected number, found inf"),
        ({"function": "exact", "success_at": float("nan")}, "success_at: expected number or null"),
        ({"weight": 2}, "function: expected text, found nothing: set it"),
    ],
)
def test_a_mistake_in_a_component_is_named(component: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.reward\.components\.right\.{said}"):
        validate(nested({"data.reward.components": {"right": component}}))


def test_wandb_is_switched_off_in_one_way() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.wandb: disabled is no mode.*backends=\[\]"):
        validate(nested({"tracking.wandb": "disabled"}))
    with pytest.raises(ConfigError, match="expected each backend once, found wandb, wandb"):
        validate(nested({"tracking.backends": ["wandb", "wandb"]}))
    with pytest.raises(ConfigError, match=r"tracking\.backends.*"):
        validate(nested({"tracking.backends": ["clearml"]}))


def test_no_secret_is_saved(tmp_path: Path) -> None:
    keys = {"rollout.engine_args.hf_token": "s3cr3t", "trainer.output_dir": str(tmp_path)}
    arguments = ["+rollout.engine_args.hf_token=s3cr3t", "+a={api_key: s3cr3t}", "x=1"]
    config = validate(nested(keys))
    path = save_config(config, "rl", arguments)
    hidden = "'+rollout.engine_args.hf_token=[redacted]' '+a=[redacted]'"
    assert path.read_text().startswith(f"# rl {hidden} x=1\n")
    save_recipe(config, "r", validate({}))
    for file in tmp_path.iterdir():
        assert "s3cr3t" not in file.read_text(), file


def test_the_keys_are_those_of_the_snapshot() -> None:
    """After a change on purpose: PYTHONPATH=. python tests/unit/config/test_schema.py"""
    assert snapshot() == (HERE / "keys.txt").read_text()


def test_the_documentation_is_current() -> None:
    """After a change of the schema: python -m rltrain.config.reference > docs/configuration.md"""
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown()


def snapshot() -> str:
    return "".join(f"{key.name}={show(key.default)}\n" for key in keys())


if __name__ == "__main__":
    (HERE / "keys.txt").write_text(snapshot())


@pytest.mark.parametrize(
    ("args", "align"),
    [
        ({}, 1),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 128),
        ({"fp8_recipe": "blockwise"}, 1),
    ],
)
def test_fp8_wants_aligned_slots(args: dict[str, str], align: int) -> None:
    assert Config.model_validate({"policy": {"megatron_args": args}}).policy.slot_align == align
