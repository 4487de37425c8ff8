"""The public names for writing your own criterion, merger or operator rule.

Everything else in the package may change from one version to the next. The guides import from this module alone.

>>> @criterion("largest-entry")
... def largest_entry(rows):
...     return rows.abs().amax(1)
>>> @merger("drop")
... class Drop:
...     def merge(self, selection):
...         return prune_without_merging(selection)
>>> @operator("my_activation", homogeneous=True, moments="pointwise")
... def my_activation(walk, node):
...     return keep_labels(walk, node)
"""

from neuron_merging.channels.analysis import Analysis, Selection, Site
from neuron_merging.channels.groups import (
    ANY,
    FIXED,
    Axis,
    AxisLabels,
    Channels,
    Consumer,
    Group,
    Labels,
    Producer,
    Units,
)
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules.common import (
    attach,
    dim_of,
    keep_labels,
    pointwise_rule,
    refuse_all_labels,
    unite_blocks,
    unite_broadcast,
)
from neuron_merging.channels.rules.data_movement import move_rule
from neuron_merging.channels.rules.norms_and_reductions import reduce_rule
from neuron_merging.channels.rules.table import Operator, operator
from neuron_merging.channels.weight_views import columns_of, filters_of
from neuron_merging.errors import MergingError, make_deprecated_getattr
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.merging.protocol import (
    FitsToData,
    MeanHandling,
    Merge,
    MergeKind,
    Merger,
    MergeResult,
    Reason,
    ReasonCode,
    StatisticsSource,
    SynthesizesInputs,
    TrialInputSource,
    merger,
    prune_without_merging,
)
from neuron_merging.selection.criteria import Criterion, criterion

__all__ = [
    "ANY",
    "FIXED",
    "Analysis",
    "Axis",
    "AxisLabels",
    "Channels",
    "Consumer",
    "Criterion",
    "FitsToData",
    "Graph",
    "Group",
    "LabelWalk",
    "Labels",
    "MeanHandling",
    "Merge",
    "MergeKind",
    "MergeResult",
    "Merger",
    "MergingError",
    "Node",
    "Operator",
    "Producer",
    "Reason",
    "ReasonCode",
    "Ref",
    "Selection",
    "Site",
    "StatisticsSource",
    "SynthesizesInputs",
    "TrialInputSource",
    "Units",
    "attach",
    "columns_of",
    "criterion",
    "dim_of",
    "filters_of",
    "keep_labels",
    "merger",
    "move_rule",
    "operator",
    "pointwise_rule",
    "prune_without_merging",
    "reduce_rule",
    "refuse_all_labels",
    "unite_blocks",
    "unite_broadcast",
]

__getattr__ = make_deprecated_getattr(
    __name__,
    {
        old: f"neuron_merging.extend:{new}"
        for old, new in {
            "Kind": "MergeKind",
            "Line": "AxisLabels",
            "Mean": "MeanHandling",
            "Merged": "MergeResult",
            "Walk": "LabelWalk",
            "Why": "ReasonCode",
            "meet": "unite_broadcast",
            "move": "move_rule",
            "pointwise": "pointwise_rule",
            "pruned": "prune_without_merging",
            "reduce": "reduce_rule",
            "same": "keep_labels",
            "tie_across": "unite_blocks",
            "unknown": "refuse_all_labels",
        }.items()
    },
)
