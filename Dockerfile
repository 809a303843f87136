# docker build -t fabric_llm . && docker run ... as docs/clusters.md says
# The image by its content: a tag can be moved. `docker buildx imagetools inspect pytorch/pytorch:TAG` prints the digest of
# another one; .ci/lock then writes the lock that goes with its torch.
ARG DIGEST=sha256:db80a41f8428644cebcb3d75b0b62df334ab6c0e75785951eb25f48bfbd42407
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime@${DIGEST}
# torch.compile and the optimizer's kernels need a compiler. The first process of a container can't be killed from within:
# that is tini, not rank 0. Versions aren't pinned, since Ubuntu keeps only the newest of a package.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends tini gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["tini", "--"]
WORKDIR /app
# A virtual environment, since pip leaves a Python alone that belongs to the distribution (PEP 668), over the image's own
# packages: its torch satisfies the range in pyproject.toml and stays, and its pip serves here as well. The image's torchrun
# would start ranks with the image's Python, which knows nothing of the environment.
RUN python3 -m venv --without-pip --system-site-packages /opt/venv \
    && printf '#!/bin/sh\nexec /opt/venv/bin/python -m torch.distributed.run "$@"\n' > /opt/venv/bin/torchrun \
    && chmod +x /opt/venv/bin/torchrun
ENV PATH=/opt/venv/bin:$PATH
COPY requirements.lock ./
RUN python -m pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY fabric_llm ./fabric_llm
# Nothing is fetched any more: all that it needs, also to build, is of the lock, with the extra `mirror`.
RUN python -m pip install --no-cache-dir --no-index --no-deps --no-build-isolation -e .
COPY . .
# Whoever `docker run --user` names isn't known here, may read this also where the checkout's umask was 077, and may write into
# the mounts and into these two.
RUN chmod -R a+rX . && mkdir -m 1777 /home/anyone /hub
ENV HOME=/home/anyone USER=anyone HF_HOME=/hub
CMD ["python", "train.py", "--devices", "4"]
