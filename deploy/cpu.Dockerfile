# syntax=docker/dockerfile:1
# docker build -f deploy/cpu.Dockerfile -t sterling .
# docker run -p 8080:8080 -v /srv/store:/store sterling
FROM rust:1.95-bookworm AS build
WORKDIR /build
# Without symbols the program is a fifth as large.
ENV CARGO_PROFILE_DIST_STRIP=symbols
COPY . .
# The registry and what was built of dependencies stay between builds of the image.
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/build/target \
    cargo build --profile dist --locked --features full --bin sterling && cp target/dist/sterling /usr/local/bin/sterling

FROM debian:bookworm-slim
# The authorities by whose certificates object stores are known.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --from=build /usr/local/bin/sterling /usr/local/bin/sterling
RUN useradd --system --uid 10001 sterling && install -d -o sterling /store /var/lib/sterling /var/cache/sterling
USER 10001
EXPOSE 8080 8081
VOLUME /store
# The port of STERLING_LISTEN, else 8080. A server with TLS answers no plain request: deploy/compose.yml has a check of its own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --start-interval=2s CMD ["bash", "-c", \
    "listen=${STERLING_LISTEN:-:8080}; exec 3<>/dev/tcp/127.0.0.1/${listen##*:} && printf 'GET /livez HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && grep -q '^HTTP/1.1 200' <&3"]
ENTRYPOINT ["sterling"]
CMD ["serve", "--store", "/store", "--listen", "0.0.0.0:8080"]
