# docker build -f deploy/cpu.Dockerfile -t sterling .
# docker run -p 8080:8080 -v /srv/store:/store sterling
FROM rust:1.95-bookworm AS build
WORKDIR /build
COPY . .
RUN cargo build --release --locked --features full

FROM debian:bookworm-slim
# The authorities by whose certificates object stores are known.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --from=build /build/target/release/sterling /usr/local/bin/sterling
RUN useradd --system --uid 10001 sterling && install -d -o sterling /store /var/lib/sterling /var/cache/sterling
USER 10001
EXPOSE 8080 8081
VOLUME /store
ENTRYPOINT ["sterling"]
CMD ["serve", "--store", "/store", "--listen", "0.0.0.0:8080"]
