"""What a step of any plan costs, whoever made it."""

from collections.abc import Collection, Sequence

from potluck.job import Job
from potluck.models.families.decoder import Decoder
from potluck.pool.cost import Prediction, Units, predict
from potluck.pool.dealing import deal_rows
from potluck.pool.plan import Plan
from potluck.pool.profile import Profile, Work
from potluck.pool.rows import predict_data
from potluck.pool.stage_costs import Stage, predict_stages
from potluck.pool.stage_profiles import rows_a_turn, stage_costs
from potluck.pool.task import task_of


def predict_plan(
    job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile], plan: Plan, owners: Collection[str] = ()
) -> Prediction:
    """What a step of the plan is expected to take.

    Args:
        job: the job.
        decoder: the model's description.
        work: what the devices were measured at.
        profiles: of the plan's devices, in the order of ranks.
        plan: of any strategy.
        owners: names of devices that have data, the coordinator always among them.

    Raises:
        BadInput: several devices, and one of them has no link; or an adapter's target matches nothing.
    """
    owners = {profiles[0].device, *owners}
    rows = rows_a_turn(job, work, len(owners))
    size = plan.micro_batch_size or job.micro_batch_size or rows
    spans = [device.links.spans[0] for device in plan.devices if device.links]
    if spans:
        costs = stage_costs(job, decoder, work, profiles, owners, size)
        return predict_stages(costs, sorted((Stage(d, *s) for d, s in enumerate(spans)), key=lambda stage: stage.start))
    task = task_of(job, decoder, work, owners=len(owners))
    if plan.strategy == "data":
        speeds = [device.speed for device in plan.devices]
        moved = any(speeds)
        dealt = [len(each) for each in deal_rows([1] * rows * len(owners), speeds)] if moved else [rows] * len(speeds)
        return predict_data(task, profiles, dealt, min(size, max(dealt)), owners=owners, moved=moved)
    units = [Units(len(d.heads), len(d.columns), len(d.vocab_rows)) for d in plan.devices]
    return predict(task, profiles, units, owners=owners)
