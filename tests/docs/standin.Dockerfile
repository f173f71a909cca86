# Stands for an official Triton container where no registry can be reached: the Python of Debian 12, and the Triton of
# build/triton at the same place.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends curl python3-pip 'libpython3.[0-9]+$' \
    && rm -rf /var/lib/apt/lists/*
COPY triton /opt/tritonserver
ENV PATH=/opt/tritonserver/bin:/usr/bin:/bin \
    LD_LIBRARY_PATH=/opt/tritonserver/lib
