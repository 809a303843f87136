# docker build -t fabric_llm . && docker run --gpus all --shm-size 8g -v $PWD/data:/app/data -v $PWD/checkpoints:/app/checkpoints fabric_llm
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
# The first process of a container can't be killed from within: that is tini, not rank 0.
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["tini", "--"]
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY fabric_llm ./fabric_llm
# The image's own torch satisfies the range in pyproject.toml and stays.
RUN pip install --no-cache-dir -e .
COPY . .
CMD ["python", "train.py", "--devices", "4"]
