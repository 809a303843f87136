"""What a run that hasn't begun will need: memory, time and money. `python plan.py` prints it.

accelerators  `accelerator`: a small table of devices, with links; how long a step takes at most
trace         `Ledger`, `Layers`: a step on fake tensors, of which all storages are counted
compiled      `CompiledLayers`: what a compiled layer keeps, from one that was run eagerly
memory        `predict_memory`: bytes of a rank on its device, and the moment of a step at which it
              needs most
reads         `beginning`, `rows_read`: where a run begins, and the rows that it reads from there on
prediction    `predict`: memory of device and host, disk, time and money of a run, from flags and a
              config.json
changes       `until_it_fits`, `fastest`: other flags, where these don't fit, or for a shorter step
sweep         `sweep`: predictions for more and more devices
shares        `through`, `within`: three short runs at three shares of replay -> what other shares
              would do, for fabric_llm.choose
page          `write`: a page about a run before it begins, for plan.py --html
"""
