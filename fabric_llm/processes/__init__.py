"""Start the ranks of a run, hear whether they live, and hear who asks them to stop.

launch   `adopt_launcher`, `start_ranks`, `Children`: ranks of torchrun, srun, or started here
watch    `Watch`: heartbeats, which rank is missing, lost, frozen or hangs, and who failed first
stop     `StopSignal`: signals, files and --max_hours that ask for a stop or a save
"""
