# rollwright on the CPU:
#   docker build -t rollwright . && docker run --rm rollwright collect CartPole-v1 --frames 1000
# For torch's small CPU build, name the index that has it: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src && rm -rf /src
ENTRYPOINT ["rollwright"]
CMD ["--help"]
