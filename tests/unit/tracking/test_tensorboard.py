"""What TensorBoard's own reader finds of a run that failed and was resumed."""

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.util.tensor_util import make_ndarray

from rltrain.tracking.dashboard import DASHBOARD


@pytest.fixture(scope="module")
def events(copied_run):
    folder = str(copied_run / "tensorboard")
    return EventAccumulator(folder, tensor_size_guidance={"scalars": 0, "text": 0}).Reload()


def values(events, tag):
    return [(event.step, make_ndarray(event.tensor_proto).item()) for event in events.Tensors(tag)]


def texts(events, tag):
    tag += "/text_summary"
    return [(step, text.decode()) for step, text in values(events, tag)]


def test_scalars_lie_on_the_steps_and_repeated_steps_count_once(events):
    assert values(events, "reward/mean") == [(0, 0.0), (1, 1.25), (2, 1.5)]
    assert values(events, "routing/overlap/layer_2") == [(0, 0.9), (1, 0.9), (2, 0.9)]


def test_scalars_say_what_they_are(events):
    metadata = events.SummaryMetadata("mismatch/k3")
    assert metadata.plugin_data.plugin_name == "scalars"
    assert "E[exp(d) - d - 1]" in metadata.summary_description
    assert "Unit: nat; lower is better" in metadata.summary_description


def test_model_output_is_text_that_ends_no_block(events):
    assert [step for step, _ in texts(events, "samples/1")] == [0, 1]
    text = texts(events, "samples/1")[0][1]
    assert "    2 | `**`\n    ```<b>" in text
    assert [step for step, _ in texts(events, "rollouts/0")] == [0, 1, 2]


def test_the_configuration_and_the_outcome_are_there_without_secrets(events, copied_run):
    assert "    trainer:\n      seed: 7" in texts(events, "config")[-1][1]
    assert texts(events, "outcome") == [(2, "finished")]
    written = b"".join(file.read_bytes() for file in (copied_run / "tensorboard").iterdir())
    assert b"hf_do_not_show" not in written


def test_an_alert_is_a_text(events):
    ((step, text),) = texts(events, "alerts/missing_routes")
    assert step == 0 and text.startswith("    Since step 0: routing/coverage is 0.5")


def test_the_dashboard_is_the_layout_of_custom_scalars(events):
    ((_, data),) = {value[1:] and value for value in values(events, "custom_scalars__config__")}
    layout = Layout.FromString(data)
    assert [category.title for category in layout.category] == list(DASHBOARD)
    learning = {chart.title: chart.multiline.tag for chart in layout.category[0].chart}
    assert list(learning["reward"]) == ["^reward/mean$", "^eval/reward_mean$"]
