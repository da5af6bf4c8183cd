#!/usr/bin/env bash
# Makes the certificates of tests/golden/tls, which are valid for a hundred years and protect nothing: an authority, two server
# certificates, a client certificate; an expired server certificate of another authority; and one that is its own authority.
# Python 3.13 rejects an authority without key usage.
set -euo pipefail
cd "$(dirname "$0")/../tests/golden/tls"
new() { # NAME SUBJECT EXTENSIONS: a key, and a certificate by the authority
    openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1.key"
    openssl req -new -key "$1.key" -subj "/CN=$2" -out "$1.csr"
    openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 36500 -sha256 -extfile <(printf '%b' "$3") -out "$1.pem"
    rm "$1.csr"
}
openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out ca.key
openssl req -x509 -new -key ca.key -subj "/CN=tests" -days 36500 -sha256 -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" -out ca.pem
new server "localhost" "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth"
new server-2 "localhost" "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth"
new client "a client" "extendedKeyUsage=clientAuth"
rm -f ca.srl ca.key
# The default of `openssl req -x509`: a server certificate that is an authority (CA:TRUE), which clients reject.
openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out self.key
openssl req -x509 -new -key self.key -subj "/CN=localhost" -days 36500 -sha256 -addext "subjectAltName=DNS:localhost,IP:127.0.0.1" -out self.pem
expired() { # A certificate that was good for a day: only `openssl ca` takes dates.
    local folder
    folder=$(mktemp -d)
    openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$folder/ca.key"
    openssl req -x509 -new -key "$folder/ca.key" -subj "/CN=tests of old" -days 36500 -sha256 -addext "basicConstraints=critical,CA:TRUE" \
        -addext "keyUsage=critical,keyCertSign" -out expired-ca.pem
    openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out expired.key
    openssl req -new -key expired.key -subj "/CN=localhost" -out "$folder/csr"
    touch "$folder/index"
    echo 01 >"$folder/serial"
    printf '%b' "[ca]\ndefault_ca=d\n[d]\ndatabase=$folder/index\nserial=$folder/serial\nnew_certs_dir=$folder\ndefault_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n" \
        "[e]\nsubjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth\n" >"$folder/config"
    openssl ca -batch -notext -config "$folder/config" -extensions e -cert expired-ca.pem -keyfile "$folder/ca.key" -in "$folder/csr" \
        -startdate 20200101000000Z -enddate 20200102000000Z -out expired.pem
    rm -r "$folder"
}
expired
