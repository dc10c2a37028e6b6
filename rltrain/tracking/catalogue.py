"""Every metric a run may log. A new metric is added to the `catalogue_` file of its section.

A name with a ``{field}`` is a family: ``routing/overlap/layer_{layer}`` covers
``routing/overlap/layer_3``.
"""

from typing import get_args

from rltrain.tracking.catalogue_metric import Metric, Section
from rltrain.tracking.catalogue_rollout import MISMATCH, ROLLOUT, ROUTING
from rltrain.tracking.catalogue_training import LEARNING, PERFORMANCE, POLICY

METRICS: tuple[Metric, ...] = (*LEARNING, *MISMATCH, *ROUTING, *ROLLOUT, *POLICY, *PERFORMANCE)
SECTIONS: tuple[Section, ...] = get_args(Section)
