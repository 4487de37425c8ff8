"""extend: all names that a criterion, a merger or an operator of your own may rely on.

Everything else in the package may change from one version to the next. The guides import from nowhere else.

>>> @criterion("largest-entry")
... def largest_entry(rows):
...     return rows.abs().amax(1)
>>> @merger("drop")
... class Drop:
...     def merge(self, selection):
...         return pruned(selection)
>>> @operator("my_activation", homogeneous=True, moments="pointwise")
... def my_activation(walk, node):
...     return same(walk, node)
"""

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.filters import columns_of, filters_of
from neuron_merging.channels.groups import Axis, Channels, Consumer, Group, Producer
from neuron_merging.channels.labels import ANY, FIXED, Labels, Line, Units
from neuron_merging.channels.operators.common import attach, dim_of, meet, same, tie_across, unknown
from neuron_merging.channels.operators.elementwise import pointwise
from neuron_merging.channels.operators.moving import move
from neuron_merging.channels.operators.reducing import reduce
from neuron_merging.channels.operators.table import Operator, operator
from neuron_merging.channels.selection import Selection, Site
from neuron_merging.channels.walk import Walk
from neuron_merging.choosing.criteria import Criterion, criterion
from neuron_merging.errors import MergingError
from neuron_merging.graph.values import Graph, Node, Ref
from neuron_merging.mergers.interface import Kind, Mean, Merge, Merged, Merger, Reason, Why, merger, pruned

__all__ = [
    "ANY",
    "FIXED",
    "Analysis",
    "Axis",
    "Channels",
    "Consumer",
    "Criterion",
    "Graph",
    "Group",
    "Kind",
    "Labels",
    "Line",
    "Mean",
    "Merge",
    "Merged",
    "Merger",
    "MergingError",
    "Node",
    "Operator",
    "Producer",
    "Reason",
    "Ref",
    "Selection",
    "Site",
    "Units",
    "Walk",
    "Why",
    "attach",
    "columns_of",
    "criterion",
    "dim_of",
    "filters_of",
    "meet",
    "merger",
    "move",
    "operator",
    "pointwise",
    "pruned",
    "reduce",
    "same",
    "tie_across",
    "unknown",
]
