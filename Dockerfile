# docker build -t fabric_llm . && docker run --gpus all --shm-size 8g -v $PWD/data:/app/data -v $PWD/checkpoints:/app/checkpoints fabric_llm
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY fabric_llm ./fabric_llm
# The image's own torch satisfies the range in pyproject.toml and stays.
RUN pip install --no-cache-dir -e .
COPY . .
CMD ["python", "train.py", "--devices", "4"]
