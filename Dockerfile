# Grading in a container: `docker build -t meshcraft .`, then follow the page "Teaching with it".
FROM python:3.12-slim-bookworm

# The sandbox: bubblewrap and its filter; unshare, prlimit and setpriv are in util-linux. git is for collect-git.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap libseccomp2 util-linux git \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/meshcraft
RUN pip install --no-cache-dir -c /opt/meshcraft/constraints.txt -e '/opt/meshcraft[cluster]' \
    && useradd --create-home --uid 1000 teacher \
    && mkdir /course && chown teacher: /course

# An ordinary user, whose user namespaces need no container capabilities.
USER teacher
WORKDIR /course
ENTRYPOINT ["meshcraft"]
CMD ["doctor"]
