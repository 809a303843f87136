"""A copy of a run's checkpoints in object storage, and the way back. A checkpoint is there if and
only if its manifest is, which is put last.

address      `is_address`, `require`, `local_folder`, `open_store`: s3://bucket/prefix and its like
credentials  `find`: keys for S3 that the environment, a file or the machine has
store        `Store`, `probe`, `reason`: what is done with objects, and what went wrong in few words
lease        `Lease`: one run on one prefix
leftovers    `remove`: parts of uploads that were killed
client       `Mirror`: the process of `upload`, as rank 0 sees it
process      `main`: the process beside the trainer
commands     `Commands`: what it is told
upload       `Uploader`: what it does
download     `patiently`, `download`, `user_cache`: objects onto the disk
fetch        `checkpoints`, `restore`, `folder_of`, `dataset`: from there into a folder
"""
