"""The gRPC face of a gateway, where there is one: its services and its limits. Importing this imports grpcio."""

from collections.abc import Callable

from carpool.admission.owners import Owners
from carpool.composition.runtime import Runtime
from carpool.composition.webhooks import callback_check
from carpool.face.grpc.call import Problems, Service
from carpool.face.grpc.health import CheckReady, Health
from carpool.face.grpc.inference import Inference, InferenceSettings
from carpool.face.grpc.kserve_v2 import KServeV2
from carpool.face.grpc.reflection import NAMES, Reflection
from carpool.face.grpc.server import GrpcServer, Pems
from carpool.face.http.lists import Answers
from carpool.face.http.places import Places
from carpool.face.http.state import HttpState
from carpool.face.intake import WAIT_MS_MAX, Intake
from carpool.settings import Settings


def make_grpc_server(
    runtime: Runtime,
    intake: Intake,
    http: HttpState,
    check_ready: CheckReady,
    is_up: Callable[[str], bool],
    answers: Answers,
) -> GrpcServer:
    """The services that clients may call. Limits and counts are those of the HTTP face, where it has them too."""
    settings, limits = runtime.settings, http.limits
    problems = Problems(http.count_problem, runtime.tracer)
    tasks = settings.tasks
    own = InferenceSettings(WAIT_MS_MAX, tasks.forget_after_read, limits.unread_bytes_max)
    places = Places("streams", settings.limits.streams)
    # For clients without a credential, from as many addresses as they like: owners' streams are not refused for those.
    strangers = Places("such streams", settings.limits.streams)
    services: list[Service] = [
        Inference(intake, own, problems, places, callback_check(settings.webhooks)),
        KServeV2(intake, is_up, answers, problems),
    ]
    served = [service.name for service in services]
    health = Health(check_ready, served, strangers, runtime.clock)
    services.append(health)
    names = [*served, Health.name, *NAMES]
    services += [Reflection(name, names, strangers) for name in NAMES]
    return GrpcServer(
        services,
        limits,
        problems,
        runtime.clock,
        when_draining=health.leave,
        is_proxy=Owners(settings.gateway.trusted_proxies).is_trusted,
    )


def pems_of(settings: Settings) -> Pems | None:
    """The server's key and certificate, if there is TLS; raises OSError."""
    gateway = settings.gateway
    if not gateway.tls_cert:
        return None
    with open(gateway.tls_key or gateway.tls_cert, "rb") as key, open(gateway.tls_cert, "rb") as chain:
        return Pems(key.read(), chain.read())
