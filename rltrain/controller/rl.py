"""Reinforcement learning: everything a run needs, started in order and ended together."""

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rltrain.algorithms.advantages import needs_critic
from rltrain.config import Config
from rltrain.controller.admission import make_schedule
from rltrain.controller.checkpoint_space import check_first_checkpoint
from rltrain.controller.checkpoint_storage import open_storage
from rltrain.controller.cluster.colocation import Colocation
from rltrain.controller.cluster.critic_group import CriticGroup
from rltrain.controller.cluster.disks import disks_of
from rltrain.controller.cluster.engines import engine_spec, start_again, start_engines
from rltrain.controller.cluster.model_folders import check_imported_weights
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.cluster.ray_cluster import cluster
from rltrain.controller.cluster.worker_group import WorkerGroup
from rltrain.controller.engine_restarts import EngineRestarts
from rltrain.controller.evaluation import Evaluator
from rltrain.controller.find_checkpoint import find_checkpoint
from rltrain.controller.loop import Trainer
from rltrain.controller.pipeline import RolloutPipeline
from rltrain.controller.run_data import RunData
from rltrain.controller.run_loop import is_finished, open_tracker, resume
from rltrain.controller.run_timeline import draw_calls, draw_engines
from rltrain.controller.sampling import Sampler
from rltrain.controller.sft import warm_started_model
from rltrain.controller.speed import Speed
from rltrain.controller.supervision import Restarts
from rltrain.controller.weight_links import SyncNodes
from rltrain.controller.weight_sync import WeightSync
from rltrain.data.loader import PromptLoader
from rltrain.data.tiny_model import build_random_model
from rltrain.environments.pool import RewardPool
from rltrain.planning.roofline import find_card
from rltrain.planning.weight_transport import choose_transport
from rltrain.rollout.generator import Generator
from rltrain.tracking.progress import RunProgress
from rltrain.weights.families import read_architecture
from rltrain.weights.sync.engine_fp8 import check_fp8_blocks


def run(config: Config, data: RunData, progress: RunProgress, restarts: Restarts) -> None:
    """Start everything a run needs, train, and leave a report whatever happens.

    Args:
        restarts: taken by engines that are started again alone
    """
    if is_finished(config):
        return
    with ExitStack() as stack:
        model_path = Path(config.model.path) if config.model.path else None
        tokenizer, problems = data.tokenizer, data.problems
        _check_engine_precision(config)
        schedule = make_schedule(config.trainer)
        progress.phase("start_ray")
        placed = stack.enter_context(cluster(config))
        storage = open_storage(config, placed)
        found = find_checkpoint(config, storage)
        check_first_checkpoint(config, storage, placed.policy_nodes)
        transport = choose_transport(config.rollout.weight_transfer, placed.placement)
        progress.phase("warm_start" if model_path is None else None)
        disks = disks_of(config, placed)
        check_imported_weights(config, disks)
        path = model_path or warm_started_model(config, placed, disks)
        arch = read_architecture(path, config.model.mtp)
        # The engines load while the policy workers do, or first, where they share GPUs: vLLM plans
        # with the memory that it finds free.
        spec = engine_spec(config, path, arch, placed)
        progress.phase("start_engines")
        engines, wait_until_ready = start_engines(config, spec, placed)
        if placed.placement.colocated:
            wait_until_ready()
            engines.sleep(2)
        progress.phase("load_weights")
        policy = PolicyGroup(config, str(path), placed)
        assert placed.logs is not None
        pool = stack.enter_context(RewardPool(config.data.reward, placed.logs))
        nodes = SyncNodes(placed.policy_nodes, placed.engine_nodes)
        weight_sync = WeightSync(policy, engines, transport, nodes)
        engine_restarts = EngineRestarts(
            engines,
            weight_sync,
            partial(start_again, config, spec, placed),
            restarts,
            placed.placement.colocated,
            waits_for_sync=config.trainer.max_staleness > 0,
        )
        generator = Generator(engines.actors, config, engine_restarts)
        prompts = PromptLoader(
            problems.train,
            config.prompts_per_round,
            config.trainer.seed,
            repeat=config.data.repeat_in_step,
        )
        sampler = Sampler(config, prompts, generator, pool, tokenizer)
        critic = CriticGroup(config, str(path), placed) if needs_critic(config.algorithm) else None
        card = find_card(placed.gpu_name)
        speed = Speed.of(config, arch, placed.placement, card)
        models: list[WorkerGroup] = [policy] if critic is None else [policy, critic]
        start = resume(config, storage, found, models, prompts)
        progress.phase("start_engines")
        capabilities = wait_until_ready()
        versions = {"engine": json.dumps(capabilities[0])}
        tracker = stack.enter_context(open_tracker(config, placed, start.after, progress, versions))
        draw_calls(tracker.timeline, models)
        draw_engines(tracker.timeline, generator, weight_sync)
        stack.enter_context(engine_restarts.sparing_others())
        pipeline = RolloutPipeline(
            sampler,
            schedule,
            tracker.schedule,
            next_step=start.after + 1,
            cursor=prompts.state_dict(),
            capacity=sum(engine["max_num_seqs"] for engine in capabilities),
            is_ahead=config.trainer.max_staleness > 0,
        )
        stack.callback(pipeline.close)
        Trainer(
            config,
            prompts,
            policy,
            critic,
            speed,
            Evaluator(config, problems.held_out, generator, pool, tokenizer, tracker),
            tracker,
            start,
            arch=arch,
            pipeline=pipeline,
            spec=spec,
            placed=placed,
            weight_sync=weight_sync,
            engine_restarts=engine_restarts,
            colocation=Colocation(placed.placement.colocated, policy, critic, engines),
            kl_coef=start.state.get("kl_coef", config.algorithm.kl.coef),
        ).train()


def _check_engine_precision(config: Config) -> None:
    if config.rollout.quantization == "fp8":
        folder = config.model.path or build_random_model(config.model)
        arch = read_architecture(Path(folder), config.model.mtp)
        check_fp8_blocks(arch, config.rollout.tensor_parallel)
