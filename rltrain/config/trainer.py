"""The training loop, its outputs and the machines that it runs on."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rltrain.config.base import NotEmpty, Section
from rltrain.config.environment import check_env

Positive = Annotated[int, Field(gt=0)]


class TrainerConfig(Section):
    steps: Positive = 500
    prompts_per_step: Positive = 64
    mini_batches: Positive = 1
    """Optimizer updates per step."""
    seed: int = 0
    eval_every: Annotated[int, Field(ge=0)] = 10
    """Steps between evaluations. The first and the last step always evaluate. 0: never evaluate."""
    resume: str = "never"
    """``auto`` resumes from the newest checkpoint in ``output_dir`` that is whole, ``step:20`` from
    that of step 20. ``never`` begins a new run."""
    resume_with_changes: bool = False
    """Resume although keys were changed that change what the checkpoint means, such as the learning
    rate or the reward (docs/checkpoints.md)."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often within ``restart_window_s`` the run starts parts again after a process of it died
    or froze: a rollout engine alone, or all parts from the newest checkpoint. 0: it ends."""
    restart_window_s: Annotated[float, Field(gt=0)] = 3600.0
    grace_s: Annotated[float, Field(gt=0)] = 30.0
    """After the first SIGINT or SIGTERM, the run finishes the update that it is in, saves and ends.
    What has not ended after so many seconds is killed."""
    output_dir: NotEmpty = "outputs/%Y-%m-%d_%H-%M-%S"
    """Folder of everything that the run writes. strftime codes are filled in at start."""
    sync_every: Positive = 1
    """Steps between weight syncs to the engines. With n, rollouts are off-policy by at most n - 1
    steps."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """How many steps the policy may be ahead of the weights that sampled a token it trains on. 0:
    a step generates, then trains. 1: the engines generate the next batch while the policy trains
    (docs/asynchronous.md). They need GPUs of their own. More lets engines with room begin further
    batches while one waits for its longest responses."""
    schedule: NotEmpty | None = None
    """The schedule.jsonl of a run, to start every batch with weights of the same age again. null:
    a batch is started when engines have room and no finished one waits."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do if a loss, a gradient norm or a log-probability is NaN or infinite. ``skip``:
    leave that update out, on all ranks, and go on. The batch is kept below ``steps/`` of the run's
    folder, for ``rltrain step replay`` (docs/failures.md)."""
    max_skipped_steps: Positive = 3
    """With ``on_nonfinite=skip``: steps in a row that may leave an update out. The run ends at the
    next."""
    invariants: Literal["stop", "warn"] = "stop"
    """What to do if the first step breaks an invariant of the trainer (docs/algorithms.md)."""
    check_weight_sync: bool = False
    """After every sync, compare all tensors of the engine bitwise with those of a newly started
    engine. Slow."""

    @property
    def resumes(self) -> bool:
        return self.resume != "never"

    @property
    def resumed_step(self) -> int | None:
        """The step that ``resume`` names; None where it names none."""
        _, colon, step = self.resume.partition(":")
        return int(step) if colon else None

    @field_validator("resume")
    @classmethod
    def resume_is_never_auto_or_a_step(cls, resume: str) -> str:
        if not re.fullmatch("never|auto|step:[1-9][0-9]*", resume):
            raise ValueError(f"expected never, auto or a step such as step:20, found {resume}")
        return resume

    @model_validator(mode="after")
    def rollouts_are_stale_for_one_reason(self) -> Self:
        if self.max_staleness and self.sync_every > 1:
            raise ValueError(
                f"max_staleness={self.max_staleness} generates ahead and syncs the weights after "
                f"every step, and sync_every={self.sync_every} syncs them less often: use one of "
                "the two"
            )
        return self

    @model_validator(mode="after")
    def resuming_needs_a_fixed_folder(self) -> Self:
        if self.resumes and "%" in self.output_dir:
            raise ValueError(
                f"resume={self.resume} looks for checkpoints in output_dir, and "
                f"{self.output_dir} is a new folder every time: set trainer.output_dir to the run "
                "to go on with"
            )
        return self


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints to resume from. The last step always saves one. 0: never save."""
    last: bool = True
    """Keep the final weights in ``checkpoints/last``. ``rltrain export`` reads them."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Number of best checkpoints to keep beside those, by ``best_metric``. Of equal ones the
    earlier counts as better."""
    best_metric: NotEmpty = "eval/accuracy"
    """A metric of docs/metrics.md that every step with a checkpoint has."""
    best_mode: Literal["max", "min"] | None = None
    """Whether the largest or the smallest value is the best. null: as docs/metrics.md says."""
    on_full: Literal["stop", "skip"] = "stop"
    """What to do if a disk has no room for a checkpoint. ``stop``: end the run. ``skip``: go on,
    and try again when the next one is due."""
    asynchronous: bool = False
    """Write a checkpoint while the run goes on. It counts once all of it is written, a step or more
    later; the host memory of a rank holds a copy of what it writes until then."""
    storage: Literal["auto", "shared", "local"] = "auto"
    """Where the ranks of several nodes write. ``shared``: into the run's folder, which all nodes
    have to see. ``local``: each into its own node's folder of the same path. ``auto``: as it is
    found to be (docs/checkpoints.md)."""
    url: NotEmpty | None = None
    """An fsspec URL of a folder, such as ``s3://bucket/run``, to keep the checkpoints in. The ranks
    upload what they wrote. No credentials in it: fsspec finds them by itself. null: keep them in
    the run's folder."""
    trust: bool = False
    """Open a checkpoint from elsewhere, one that does not name its model, or one that could run
    code when it is opened (docs/security.md). Only set it for checkpoints that you trust."""

    @model_validator(mode="after")
    def the_best_are_among_those_that_are_saved(self) -> Self:
        if self.keep_best and not self.every:
            raise ValueError(
                f"keep_best={self.keep_best} keeps checkpoints, and every=0 saves none: set "
                "checkpoint.every"
            )
        return self

    @field_validator("url")
    @classmethod
    def a_url_has_no_credentials(cls, url: str | None) -> str | None:
        if url is None:
            return None
        protocol, separator, rest = url.partition("://")
        if not separator or not protocol.isalnum() or not rest:
            raise ValueError(f"url={url}: expected a URL such as s3://bucket/run or file:///folder")
        # Not shown: what is refused may be a secret.
        if ":" in rest.partition("@")[0] and "@" in rest:
            raise ValueError(
                f"expected a {protocol}:// URL without a user and password: set them in the "
                "environment, or where fsspec's package looks for them"
            )
        if "?" in rest or "#" in rest:
            raise ValueError(f"expected a {protocol}:// URL of a folder, without a ? or #")
        return url.rstrip("/")


class ClusterConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_gpus: Positive | None = None
    """Number of GPUs to use, over all nodes. null: as many as the run needs of those that Ray finds
    free."""
    placement: Literal["auto", "colocated", "disaggregated"] = "auto"
    """``colocated``: the engines share the GPUs of the policy and alternate with it.
    ``disaggregated``: the engines have their own GPUs. ``auto``: disaggregated if there are enough
    GPUs, else colocated. On CPUs all share the cores."""
    address: NotEmpty | None = None
    """Address of a running Ray cluster. null: start a local one on the loopback interface."""
    cpus_per_rank: Annotated[float, Field(ge=0.001)] = 1.0
    """CPUs that a policy or critic rank takes of its node, in a running Ray cluster (``address``)
    without GPUs. A node with no CPU for Ray gets no rank."""
    cpus_per_engine: Annotated[float, Field(ge=0.001)] = 1.0
    """The same for an engine."""
    interface: NotEmpty | None = None
    """Network interface of every node, such as ``eth0``, by which ranks and engines talk to one
    another. null: the one that has the node's Ray address. ``GLOO_SOCKET_IFNAME`` and
    ``NCCL_SOCKET_IFNAME`` stay as they are where you set them."""
    ports: list[Annotated[int, Field(ge=1, le=65535)]] = Field(default_factory=list)
    """First and last TCP port at which rank 0 of the policy, and of the critic, may listen for the
    others: two runs on a node need four. ``[]``: any free one. Gloo and NCCL choose theirs among
    those of ``net.ipv4.ip_local_port_range`` of the node."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    call_timeout_s: Annotated[float, Field(gt=0)] = 7200.0
    phase_timeout_factor: Annotated[float, Field(ge=2)] | None = 20.0
    """A call of workers or engines that takes so many times as long as the median of its earlier
    ones, in the same phase of a step, is taken to hang. From its fourth call on; until then, and
    with null, ``call_timeout_s`` is the limit."""
    phase_timeout_floor_s: Annotated[float, Field(gt=0)] = 300.0
    """No limit by ``phase_timeout_factor`` is shorter."""
    node_timeout_s: Annotated[float, Field(ge=5)] = 30.0
    """How long a node of the cluster may be silent. Then the run ends with an error that names it,
    and the node ends what is left of the run there."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Environment variables of every worker and engine and their child processes, on all nodes.
    In a cluster they also get those of the driver whose names begin with ``NCCL_``, ``GLOO_``,
    ``HF_``, ``VLLM_`` or ``TOKENIZERS_``. Secrets such as ``HF_TOKEN`` are best left to the
    driver's environment: no file of the run or of Ray holds them."""

    @field_validator("env")
    @classmethod
    def env_leaves_our_own_alone(cls, env: dict[str, Any]) -> dict[str, Any]:
        check_env(env)
        return env

    @field_validator("ports")
    @classmethod
    def ports_are_a_range(cls, ports: list[int]) -> list[int]:
        if ports and (len(ports) != 2 or ports[0] > ports[1]):
            raise ValueError(f"expected the first and the last port, found {ports}")
        return ports

    @model_validator(mode="after")
    def an_interface_is_of_a_cluster(self) -> Self:
        if self.address is None and (self.interface is not None or self.ports):
            raise ValueError(
                "interface and ports are those of a cluster, and without cluster.address a run "
                "listens on the loopback interface: set cluster.address, or drop them"
            )
        return self

    @model_validator(mode="after")
    def gpus_are_for_cuda(self) -> Self:
        if self.device == "cpu" and self.num_gpus is not None:
            raise ValueError(
                f"device=cpu and num_gpus={self.num_gpus} contradict each other: drop one"
            )
        return self


Share = Annotated[float, Field(ge=0, le=1)]


class AlertsConfig(Section):
    """When a run is said to look sick (docs/tracking.md)."""

    enabled: bool = True
    window: Annotated[int, Field(ge=5)] = 20
    """Steps before the recent ones that a metric is compared with. There are no alerts of falls
    before so many steps."""
    recent: Positive = 5
    """Steps whose median has to have fallen; twice as many of the throughput."""
    noise: Annotated[float, Field(gt=0)] = 8.0
    """A fall is larger than this many standard errors of the recent median, a spike of k3 than
    this many standard deviations of its logarithm, both by the window's median absolute
    deviation."""
    entropy: Share = 0.2
    """Alert if the entropy falls below this share of the highest median of a window so far."""
    length: Share = 0.4
    """The same of the mean response length."""
    reward: Share = 0.5
    """Alert if the mean reward keeps less than this share of what it has gained since the first
    window."""
    throughput: Share = 0.5
    """Alert if the tokens per second fall below this share of the window's median."""
    k3_factor: Annotated[float, Field(ge=1)] = 10.0
    """Alert if mismatch/k3 is this many times the window's median, and above ``k3_floor``."""
    k3_floor: Annotated[float, Field(ge=0)] = 1e-3
    k3_limit: Annotated[float, Field(gt=0)] = 0.1
    """Alert if mismatch/k3 is above this, whatever it was before."""
    coverage: Share = 1.0
    """Alert if routing/coverage is below this."""
    again_after: Positive = 50
    """Steps before an alert of the same kind is raised again."""


class TrackingConfig(Section):
    backends: list[Literal["wandb", "tensorboard", "mlflow"]] = Field(default=["wandb"])
    """Trackers that get a copy of what the run writes into its folder (docs/tracking.md). ``[]``:
    the folder alone."""
    wandb: Literal["auto", "online", "offline"] = "auto"
    """Mode of Weights & Biases, if it is one of the backends. ``auto`` is online if you are logged
    in, else offline."""
    project: NotEmpty = "rltrain"
    """Project of wandb, experiment of MLflow."""
    name: str | None = None
    """Name of the run in wandb and MLflow. null: they choose one."""
    num_samples: Annotated[int, Field(ge=0)] = 8
    """Responses per evaluation in ``samples.jsonl``, and rollouts per chosen step in
    ``rollouts.jsonl``. Rollouts are kept in whole groups, at least one."""
    rollouts_every: Annotated[int, Field(ge=0)] = 10
    """Steps between those whose training rollouts are kept in ``rollouts.jsonl``, token by token
    (docs/tracking.md). The first and the last step are always kept. 0: never keep any."""
    alerts: AlertsConfig = AlertsConfig()

    @field_validator("wandb", mode="before")
    @classmethod
    def backends_says_which_trackers_run(cls, mode: object) -> object:
        if mode == "disabled":
            raise ValueError(
                "disabled is no mode: leave wandb out of tracking.backends. "
                "tracking.backends=[] writes the run's folder alone"
            )
        return mode

    @field_validator("backends")
    @classmethod
    def a_backend_is_named_once(cls, backends: list[str]) -> list[str]:
        if len(set(backends)) < len(backends):
            raise ValueError(f"expected each backend once, found {', '.join(backends)}")
        return backends
