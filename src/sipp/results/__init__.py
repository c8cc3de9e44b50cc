"""Frozen records of results and options, how they print, and helpers that every folder uses."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.results import (
        check as check,  # arguments: check.share("share", 0.05) gives the value, or an error that names it
        hashing as hashing,  # SHA-256 of networks
        numerics as numerics,  # dtypes, devices, exact products
        other_names as other_names,  # what other libraries call options and methods
        words as words,  # numbers and names as text
    )
    from sipp.results.assumption import (
        Assumption as Assumption,
        LayerAssumption as LayerAssumption,
    )
    from sipp.results.bench import (
        Bench as Bench,
        BenchRun as BenchRun,
        Speed as Speed,
    )
    from sipp.results.binomial import (
        holdout_needed as holdout_needed,
        k_allowed as k_allowed,
    )
    from sipp.results.blend import (
        BlendChoice as BlendChoice,
        BlendTrial as BlendTrial,
    )
    from sipp.results.bounds import (
        Coverage as Coverage,
        Guarantee as Guarantee,
        Measured as Measured,
        NetworkBound as NetworkBound,
    )
    from sipp.results.certificate import (
        AccuracyCertificate as AccuracyCertificate,
        AnyCertificate as AnyCertificate,
        Certificate as Certificate,
        Measure as Measure,
        accuracy_claim as accuracy_claim,
        output_claim as output_claim,
    )
    from sipp.results.comparison import (
        Compared as Compared,
        Comparison as Comparison,
    )
    from sipp.results.evaluation import (
        Evaluation as Evaluation,
        TextScores as TextScores,
    )
    from sipp.results.gradual import (
        Gradual as Gradual,
        budget_at as budget_at,
        cut_times as cut_times,
    )
    from sipp.results.jsonio import (
        from_json as from_json,
        to_json as to_json,
    )
    from sipp.results.options import (
        GIVEN as GIVEN,
        HELD_BACK_ONE_IN as HELD_BACK_ONE_IN,
        SHARE as SHARE,
        Allocation as Allocation,
        Draws as Draws,
        Loss as Loss,
        Method as Method,
        Mode as Mode,
        NormStats as NormStats,
        Option as Option,
        Pattern as Pattern,
        Precision as Precision,
        PruneOptions as PruneOptions,
        Reduce as Reduce,
        RepairMethod as RepairMethod,
        Selector as Selector,
    )
    from sipp.results.pruned import (
        OutputChange as OutputChange,
        Pruned as Pruned,
        PrunedLayer as PrunedLayer,
        SeenInputs as SeenInputs,
        ways_to_lose_less as ways_to_lose_less,
    )
    from sipp.results.pruned_on_disk import (
        BlockWeight as BlockWeight,
        PrunedOnDisk as PrunedOnDisk,
    )
    from sipp.results.pruned_to import (
        Level as Level,
        NetworkLike as NetworkLike,
        PrunedTo as PrunedTo,
        certificate_of as certificate_of,
        inputs_seen as inputs_seen,
        network_of as network_of,
        record_of as record_of,
    )
    from sipp.results.repair import (
        FittedLayer as FittedLayer,
        Polish as Polish,
        Repair as Repair,
    )
    from sipp.results.saved_file import (
        SavedFile as SavedFile,
        StoredTensor as StoredTensor,
    )
    from sipp.results.saved_network import (
        SavedNetwork as SavedNetwork,
    )
    from sipp.results.sheet import (
        Entry as Entry,
        Sheet as Sheet,
        Table as Table,
        shown as shown,
    )
    from sipp.results.shrunk import (
        ChannelsLeft as ChannelsLeft,
        Chosen as Chosen,
        Shrunk as Shrunk,
        ShrunkLayer as ShrunkLayer,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
