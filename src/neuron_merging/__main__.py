"""`python -m neuron_merging` is `neuron-merging`."""

import sys

from neuron_merging.cli.app import main

sys.exit(main())
