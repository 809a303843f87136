"""Start the ranks of a run, hear whether they live, and hear who asks them to stop.

launch   `adopt_launcher`, `start_ranks`, `Children`: ranks of torchrun, srun, or started here
meeting  `Meeting`: rendezvous, heartbeats until all ranks have joined
watch    `Watch`, `NoWatch`: heartbeats from then on, and which rank hangs
stop     `StopSignal`, `Requests`: signals, files and --max_hours that ask for a stop or a save
"""
