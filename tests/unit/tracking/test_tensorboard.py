"""What TensorBoard's own data server finds of a run that failed and was resumed."""

import time

import pytest
from tensorboard.context import RequestContext
from tensorboard.data.server_ingester import SubprocessServerDataIngester, get_server_binary
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.util.grpc_util import ChannelCredsType

from rltrain.tracking.dashboard import DASHBOARD

ASKED = {"experiment_id": "", "downsample": 1000}


@pytest.fixture(scope="module")
def server(copied_run):
    """The process that ``tensorboard`` starts for its pages."""
    ingester = SubprocessServerDataIngester(
        server_binary=get_server_binary(),
        logdir=str(copied_run / "tensorboard"),
        reload_interval=0,
        channel_creds_type=ChannelCredsType.LOCAL,
    )
    ingester.start()
    provider = ingester.data_provider
    for _ in range(100):
        texts = provider.read_tensors(RequestContext(), plugin_name="text", **ASKED)
        if "outcome/text_summary" in texts.get(".", {}):  # the last that is written
            return provider
        time.sleep(0.1)
    pytest.fail("TensorBoard's data server finds no outcome")


def scalars(server, tag):
    (tags,) = server.read_scalars(RequestContext(), plugin_name="scalars", **ASKED).values()
    return [(datum.step, datum.value) for datum in tags[tag]]


def texts(server, tag):
    (tags,) = server.read_tensors(RequestContext(), plugin_name="text", **ASKED).values()
    return [(d.step, d.numpy.item().decode()) for d in tags[f"{tag}/text_summary"]]


def test_scalars_lie_on_the_steps_and_repeated_steps_count_once(server):
    assert scalars(server, "reward/mean") == [(0, 0.0), (1, 1.25), (2, 1.5)]
    assert scalars(server, "routing/overlap/layer_2") == [
        (step, pytest.approx(0.9)) for step in range(3)
    ]


def test_scalars_say_what_they_are(server):
    (tags,) = server.list_scalars(
        RequestContext(), experiment_id="", plugin_name="scalars"
    ).values()
    assert "E[exp(d) - d - 1]" in tags["mismatch/k3"].description
    assert "Unit: nat; lower is better" in tags["mismatch/k3"].description


def test_model_output_is_text_that_ends_no_block(server):
    assert [step for step, _ in texts(server, "samples/1")] == [0, 1]
    text = texts(server, "samples/1")[0][1]
    assert "    2 | `**`\n    ```<b>" in text
    assert [step for step, _ in texts(server, "rollouts/0")] == [0, 1, 2]


def test_the_configuration_and_the_outcome_are_there_without_secrets(server, copied_run):
    assert "    trainer:\n      seed: 7" in texts(server, "config")[-1][1]
    assert texts(server, "outcome")[-1] == (2, "finished")
    written = b"".join(file.read_bytes() for file in (copied_run / "tensorboard").iterdir())
    assert b"hf_do_not_show" not in written


def test_an_alert_is_a_text(server):
    ((step, text),) = texts(server, "alerts/missing_routes")
    assert step == 0 and text.startswith("    Since step 0: routing/coverage is 0.5")


def test_the_dashboard_is_the_layout_of_custom_scalars(server):
    (tags,) = server.read_tensors(RequestContext(), plugin_name="custom_scalars", **ASKED).values()
    layout = Layout.FromString(tags["custom_scalars__config__"][-1].numpy.item())
    assert [category.title for category in layout.category] == list(DASHBOARD)
    learning = {chart.title: chart.multiline.tag for chart in layout.category[0].chart}
    assert list(learning["reward"]) == ["^reward/mean$", "^eval/reward_mean$"]
