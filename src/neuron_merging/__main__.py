"""`python -m neuron_merging` is `neuron-merging`."""

import sys

from neuron_merging.tool.cli import main

sys.exit(main())
