//! For every kind, element type, op, vendor and number of ranks: the lowering gives the result that torch defines, or
//! the operation is refused with a reason. The tests run the lowering on a model of a library. The model works in plain
//! memory and has only the stated capabilities.

use crate::common::device::{Case, OPS, data, local, spans};
use crate::common::reference::{is_defined, reference_all};
use sagellm::engine::device::lowering::Double;
use sagellm::engine::device::{
    Call, Capabilities, Job, Local, Lowering, LoweringInput, Message, Method, Vendor, calls, lower,
};
use sagellm::types::{Dtype, Kind, ReduceOp, Span};

/// Capabilities of the vendors' current libraries, and of older libraries that lack some functions.
fn libraries() -> Vec<Capabilities> {
    let mut all: Vec<Capabilities> = Vendor::ALL.iter().map(|vendor| vendor.capabilities()).collect();
    for vendor in Vendor::ALL {
        let old = Capabilities {
            gather: false,
            scatter: false,
            all_to_all_v: false,
            group: false,
            double: Double::Kept,
            ..vendor.capabilities()
        };
        all.push(old);
    }
    all.push(Capabilities { double: Double::AsFloat, ..Vendor::Cncl.capabilities() });
    all
}

/// A call that owns its memory.
#[derive(Clone, Debug)]
enum Owned {
    One(Call<'static>),
    AllToAllV { send: usize, recv: usize, send_counts: Vec<u64>, recv_counts: Vec<u64> },
    Exchange(Vec<Message>),
}

fn collect(job: &Job<'_>) -> Vec<Owned> {
    let mut list = Vec::new();
    calls(job, &mut |call| {
        list.push(match *call {
            Call::AllToAllV { send, recv, send_counts, recv_counts, .. } => {
                Owned::AllToAllV { send, recv, send_counts: send_counts.to_vec(), recv_counts: recv_counts.to_vec() }
            }
            Call::Exchange(messages) => Owned::Exchange(messages.to_vec()),
            Call::AllReduce { send, recv, count, dtype, op } => {
                Owned::One(Call::AllReduce { send, recv, count, dtype, op })
            }
            Call::Broadcast { buffer, count, dtype, root } => {
                Owned::One(Call::Broadcast { buffer, count, dtype, root })
            }
            Call::Reduce { send, recv, count, dtype, op, root } => {
                Owned::One(Call::Reduce { send, recv, count, dtype, op, root })
            }
            Call::AllGather { send, recv, count, dtype } => Owned::One(Call::AllGather { send, recv, count, dtype }),
            Call::ReduceScatter { send, recv, count, dtype, op } => {
                Owned::One(Call::ReduceScatter { send, recv, count, dtype, op })
            }
            Call::Gather { send, recv, count, dtype, root } => {
                Owned::One(Call::Gather { send, recv, count, dtype, root })
            }
            Call::Scatter { send, recv, count, dtype, root } => {
                Owned::One(Call::Scatter { send, recv, count, dtype, root })
            }
            Call::Copy { from, to, bytes } => Owned::One(Call::Copy { from, to, bytes }),
        });
        Ok(())
    })
    .unwrap();
    list
}

fn read(addr: usize, bytes: usize) -> Vec<u8> {
    // SAFETY: the address is in a vector of the test, which outlives the model; `calls` has checked the length.
    if bytes == 0 { Vec::new() } else { unsafe { std::slice::from_raw_parts(addr as *const u8, bytes) }.to_vec() }
}

fn write(addr: usize, data: &[u8]) {
    // SAFETY: as in `read`.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), addr as *mut u8, data.len()) }
}

/// Plays the library for all ranks together, step by step. The test fails if a rank calls a function that the library
/// lacks, or if the ranks' calls differ.
fn model(able: &Capabilities, mut lists: Vec<Vec<Owned>>) {
    lists.iter_mut().for_each(|list| list.reverse());
    loop {
        for list in &mut lists {
            while let Some(Owned::One(Call::Copy { from, to, bytes })) = list.last() {
                write(*to, &read(*from, *bytes));
                list.pop();
            }
        }
        let heads: Vec<Option<Owned>> = lists.iter_mut().map(Vec::pop).collect();
        match heads.iter().flatten().next() {
            None => return,
            Some(Owned::Exchange(_)) => exchange(&heads),
            Some(Owned::AllToAllV { .. }) => {
                assert!(able.all_to_all_v, "{} has no all_to_all", able.name);
                all_to_all_v(&heads);
            }
            Some(Owned::One(_)) => together(able, &heads),
        }
    }
}

fn exchange(heads: &[Option<Owned>]) {
    let lists: Vec<&[Message]> = heads
        .iter()
        .map(|head| match head {
            None => &[][..],
            Some(Owned::Exchange(messages)) => messages,
            other => panic!("one rank exchanges, another does {other:?}"),
        })
        .collect();
    let mut sent = 0;
    for (me, list) in lists.iter().enumerate() {
        for (peer, other) in lists.iter().enumerate() {
            let to = list.iter().filter(|m| m.sends && m.peer as usize == peer);
            let from: Vec<_> = other.iter().filter(|m| !m.sends && m.peer as usize == me).collect();
            let to: Vec<_> = to.collect();
            assert_eq!(to.len(), from.len(), "messages of {me} to {peer}");
            assert!(me != peer || to.is_empty(), "a message to oneself");
            for (to, from) in to.iter().zip(&from) {
                assert_eq!(to.bytes, from.bytes);
                write(from.addr, &read(to.addr, to.bytes));
                sent += 2;
            }
        }
    }
    assert_eq!(sent, lists.iter().map(|list| list.len()).sum::<usize>(), "a message without its other half");
}

fn all_to_all_v(heads: &[Option<Owned>]) {
    let all: Vec<_> = heads
        .iter()
        .map(|head| match head {
            Some(Owned::AllToAllV { send, recv, send_counts, recv_counts }) => (send, recv, send_counts, recv_counts),
            other => panic!("not all ranks are in all_to_all: {other:?}"),
        })
        .collect();
    let before = |counts: &[u64], q: usize| counts[..q].iter().sum::<u64>() as usize;
    for (me, (send, _, send_counts, _)) in all.iter().enumerate() {
        for (peer, (_, recv, _, recv_counts)) in all.iter().enumerate() {
            assert_eq!(send_counts[peer], recv_counts[me]);
            let data = read(*send + before(send_counts, peer), send_counts[peer] as usize);
            write(*recv + before(recv_counts, me), &data);
        }
        let (from, to) = (**send, *all[me].1);
        let (sent, received) = (before(send_counts, all.len()), before(all[me].3, all.len()));
        assert!(from + sent <= to || to + received <= from, "send and receive buffers must differ");
    }
}

fn together(able: &Capabilities, heads: &[Option<Owned>]) {
    let one: Vec<Call<'_>> = heads
        .iter()
        .map(|head| match head {
            Some(Owned::One(call)) => *call,
            other => panic!("not all ranks make the call: {other:?}"),
        })
        .collect();
    let agree = |what: &dyn Fn(&Call<'_>) -> String| {
        assert!(one.iter().all(|call| what(call) == what(&one[0])), "ranks differ: {one:?}");
    };
    let ranks = one.len();
    let combine = |inputs: &[Vec<u8>], dtype: Dtype, op: ReduceOp| {
        assert!(able.combines(dtype, op), "{} does not combine {dtype:?} by {op:?}", able.name);
        let factor = if let ReduceOp::PremulSum(factor) = op { factor } else { 1.0 };
        reference_all(dtype, op, inputs, &vec![factor; ranks])
    };
    let sends = |bytes: usize| -> Vec<Vec<u8>> { one.iter().map(|call| read(send_of(call), bytes)).collect() };
    match one[0] {
        Call::AllReduce { count, dtype, op, .. } => {
            agree(&|call| match call {
                Call::AllReduce { count, dtype, op, .. } => format!("{count} {dtype:?} {op:?}"),
                other => other.name().into(),
            });
            let result = combine(&sends(count * dtype.size()), dtype, op);
            one.iter().for_each(|call| write(recv_of(call), &result));
        }
        Call::Reduce { count, dtype, op, root, .. } => {
            agree(&|call| match call {
                Call::Reduce { count, dtype, op, root, .. } => format!("{count} {dtype:?} {op:?} {root}"),
                other => other.name().into(),
            });
            let result = combine(&sends(count * dtype.size()), dtype, op);
            write(recv_of(&one[root as usize]), &result);
            let others = (0..ranks).filter(|q| able.reduce_clobbers_input && *q != root as usize);
            others.for_each(|q| write(recv_of(&one[q]), &vec![0xee; count * dtype.size()]));
        }
        Call::ReduceScatter { count, dtype, op, .. } => {
            let block = count * dtype.size();
            let result = combine(&sends(block * ranks), dtype, op);
            (0..ranks).for_each(|q| write(recv_of(&one[q]), &result[q * block..][..block]));
        }
        Call::Broadcast { count, dtype, root, .. } => {
            let data = read(send_of(&one[root as usize]), count * dtype.size());
            one.iter().for_each(|call| write(send_of(call), &data));
        }
        Call::AllGather { count, dtype, .. } => {
            let data = sends(count * dtype.size()).concat();
            one.iter().for_each(|call| write(recv_of(call), &data));
        }
        Call::Gather { count, dtype, root, .. } => {
            assert!(able.gather);
            write(recv_of(&one[root as usize]), &sends(count * dtype.size()).concat());
        }
        Call::Scatter { count, dtype, root, .. } => {
            assert!(able.scatter);
            let block = count * dtype.size();
            let data = read(send_of(&one[root as usize]), block * ranks);
            (0..ranks).for_each(|q| write(recv_of(&one[q]), &data[q * block..][..block]));
        }
        other => panic!("no call of the model: {other:?}"),
    }
}

fn send_of(call: &Call<'_>) -> usize {
    match *call {
        Call::AllReduce { send, .. }
        | Call::Reduce { send, .. }
        | Call::ReduceScatter { send, .. }
        | Call::AllGather { send, .. }
        | Call::Gather { send, .. }
        | Call::Scatter { send, .. } => send,
        Call::Broadcast { buffer, .. } => buffer,
        other => panic!("{other:?}"),
    }
}

fn recv_of(call: &Call<'_>) -> usize {
    match *call {
        Call::AllReduce { recv, .. }
        | Call::Reduce { recv, .. }
        | Call::ReduceScatter { recv, .. }
        | Call::AllGather { recv, .. }
        | Call::Gather { recv, .. }
        | Call::Scatter { recv, .. } => recv,
        other => panic!("{other:?}"),
    }
}

/// Runs the whole operation on all ranks, in the steps of the shim.
fn run(case: &Case, lowering: &Lowering, able: &Capabilities) -> Vec<Vec<u8>> {
    let LoweringInput { kind, dtype, ranks, .. } = case.asked;
    // `dtype` is the element type before the local steps, `sent_type` the type after them.
    let mut sent_type = dtype;
    let mut inputs: Vec<Vec<u8>> = Vec::new();
    for me in 0..ranks {
        sent_type = dtype;
        let input = case.input(me);
        inputs.push(lowering.before.iter().fold(input, |data, step| local(*step, &mut sent_type, data, ranks)));
    }
    let scaled = |bytes: usize| bytes / dtype.size() * sent_type.size();
    let before: Vec<Vec<u8>> = inputs.clone();
    let mut outputs: Vec<Vec<u8>> = (0..ranks)
        .map(|me| {
            let out = if case.asked.kind == Kind::Broadcast && me == case.root { 0 } else { case.expected(me).len() };
            let blocks = if matches!(lowering.after.first(), Some(Local::Fold(_))) { ranks } else { 1 };
            vec![0; scaled(out) * blocks]
        })
        .collect();
    if kind == Kind::Barrier {
        (inputs, outputs) = (vec![vec![0; 4]; ranks], vec![vec![0; 4]; ranks]);
    }
    let lists = (0..ranks)
        .map(|me| {
            // If the blocks have equal sizes and need not be contiguous, even ranks pass them one by one and odd ranks
            // as a whole.
            let one_by_one = !case.asked.equal_counts || !lowering.contiguous && me % 2 == 0;
            let scale = |blocks: Vec<usize>| blocks.into_iter().map(scaled).collect::<Vec<_>>();
            let sends = matches!(kind, Kind::Scatter | Kind::ReduceScatter | Kind::AllToAll) && one_by_one;
            let recvs = matches!(kind, Kind::Gather | Kind::AllGather | Kind::AllToAll) && one_by_one;
            let send_blocks = sends.then(|| scale(case.blocks(me, true)));
            let gathered = || match kind {
                Kind::Gather => vec![inputs[me].len(); ranks],
                _ => scale(case.blocks(me, false)),
            };
            let recv_blocks = recvs.then(gathered);
            let send = spans(&mut inputs[me], send_blocks);
            let recv = spans(&mut outputs[me], recv_blocks);
            let (rank, root) = (me as u32, case.root as u32);
            let job = Job { factor: 0, lowering, rank, ranks: ranks as u32, root, send: &send, recv: &recv };
            collect(&job)
        })
        .collect();
    model(able, lists);
    if kind == Kind::Barrier {
        return vec![Vec::new(); ranks];
    }
    // The library must not change the inputs. In a reduce, torch allows such a change on ranks that are not the root.
    if !lowering.clobbers_input && kind != Kind::Reduce {
        assert_eq!(inputs, before, "an input was changed");
    }
    (0..ranks)
        .map(|me| {
            let mut result_type = sent_type;
            let output = std::mem::take(&mut outputs[me]);
            if kind == Kind::Broadcast && me == case.root {
                let data = inputs[me].clone();
                return lowering.after.iter().fold(data, |data, step| local(*step, &mut result_type, data, ranks));
            }
            lowering.after.iter().fold(output, |data, step| local(*step, &mut result_type, data, ranks))
        })
        .collect()
}

fn check(asked: LoweringInput, able: &Capabilities) -> Option<Lowering> {
    let made = lower(&asked, able);
    let undefined = asked.kind.reduces() && !is_defined(asked.dtype, asked.op);
    let double = matches!(asked.dtype, Dtype::F64 | Dtype::C128) && able.double == Double::Refused;
    let lowering = match made {
        Ok(lowering) => lowering,
        Err(text) => {
            assert!(undefined || double, "{asked:?} on {} is refused: {text}", able.name);
            assert!(
                text.starts_with("sagellm: ") && (text.contains("convert") || text.contains("use another")),
                "{text}"
            );
            return None;
        }
    };
    assert!(!undefined && !double, "{asked:?} on {} is not refused: {lowering:?}", able.name);
    for root in [0, asked.ranks - 1] {
        let case = Case { asked, root };
        let results = run(&case, &lowering, able);
        for (me, result) in results.into_iter().enumerate() {
            let expected = case.expected_by(me, able);
            assert_eq!(result, expected, "rank {me}, root {root}, {asked:?} on {}: {lowering:?}", able.name);
        }
    }
    Some(lowering)
}

#[test]
fn every_lowering_gives_what_torch_defines_or_refuses() {
    let (mut made, mut refused) = (0, 0);
    for able in libraries() {
        for kind in Kind::COLLECTIVES {
            for dtype in Dtype::ALL {
                for op in if kind.reduces() { &OPS[..] } else { &OPS[..1] } {
                    for ranks in [1, 2, 3, 5] {
                        for even in [true, false] {
                            let asked = LoweringInput { kind, dtype, op: *op, ranks, equal_counts: even, dense: true };
                            match check(asked, &able) {
                                Some(_) => made += 1,
                                None => refused += 1,
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(made > 15_000 && refused > 3000, "{made} made, {refused} refused");
}

#[test]
fn a_message_goes_from_one_rank_to_another() {
    for able in libraries() {
        let asked = |kind| LoweringInput {
            kind,
            dtype: Dtype::F32,
            op: ReduceOp::Sum,
            ranks: 3,
            equal_counts: true,
            dense: true,
        };
        let (sends, recvs) = (lower(&asked(Kind::Send), &able).unwrap(), lower(&asked(Kind::Recv), &able).unwrap());
        assert_eq!((sends.method, sends.why.as_str()), (Method::Exchange, ""));
        let (mut from, mut to) = (data(Dtype::F32, 1, 5), vec![0; 20]);
        let (send, recv) = (spans(&mut from, None), spans(&mut to, None));
        let job =
            |lowering, rank, root, send, recv| collect(&Job { factor: 0, lowering, rank, ranks: 3, root, send, recv });
        model(&able, vec![job(&sends, 0, 2, &send, &[]), Vec::new(), job(&recvs, 2, 0, &[], &recv)]);
        assert_eq!(from, to);
        let oneself = Job { factor: 0, lowering: &sends, rank: 1, ranks: 3, root: 1, send: &send, recv: &[] };
        assert!(calls(&oneself, &mut |_| Ok(())).unwrap_err().text().contains("its own peer"));
    }
}

#[test]
fn internal_formats_and_impossible_types_are_refused_with_the_fix() {
    let able = Vendor::Hccl.capabilities();
    let asked = LoweringInput {
        kind: Kind::AllGather,
        dtype: Dtype::F16,
        op: ReduceOp::Sum,
        ranks: 2,
        equal_counts: true,
        dense: false,
    };
    let text = lower(&asked, &able).unwrap_err();
    assert!(text.contains("internal format") && text.contains("npu_format_cast(tensor, 2)"), "{text}");
    let able = Capabilities { double: Double::Refused, ..Vendor::Cncl.capabilities() };
    let asked = LoweringInput { kind: Kind::Broadcast, dtype: Dtype::F64, dense: true, ..asked };
    let text = lower(&asked, &able).unwrap_err();
    assert!(text.contains("no 64-bit floats") && text.contains("SAGELLM_DOUBLE_AS_FLOAT=1"), "{text}");
}

#[test]
fn sizes_that_do_not_belong_together_are_found_before_the_library_is_called() {
    let able = Vendor::Nccl.capabilities();
    let span = |bytes| [Span { addr: 64, bytes }];
    for (kind, dtype, send, recv) in [
        (Kind::AllReduce, Dtype::F32, span(8), span(12)),
        (Kind::AllReduce, Dtype::F32, span(6), span(6)),
        (Kind::AllGather, Dtype::F32, span(8), span(15)),
        (Kind::ReduceScatter, Dtype::F32, span(16), span(5)),
        (Kind::AllToAll, Dtype::F32, span(15), span(16)),
    ] {
        let asked = LoweringInput { kind, dtype, op: ReduceOp::Sum, ranks: 2, equal_counts: true, dense: true };
        let lowering = lower(&asked, &able).unwrap();
        let job = Job { factor: 0, lowering: &lowering, rank: 0, ranks: 2, root: 0, send: &send, recv: &recv };
        let mut called = 0;
        let error = calls(&job, &mut |_| {
            called += 1;
            Ok(())
        });
        assert!(error.is_err() && called == 0, "{kind} {send:?} {recv:?}");
    }
}

/// Returns one line for each group of operations and each vendor, in the format of docs/internals/vendors.md.
fn table() -> String {
    let types = |name: &'static str, list: &'static [Dtype]| (name, list);
    let groups = [
        types("bool", &[Dtype::Bool]),
        types("uint8", &[Dtype::U8]),
        types("int8", &[Dtype::I8]),
        types("int16", &[Dtype::I16]),
        types("uint16", &[Dtype::U16]),
        types("int32, int64", &[Dtype::I32, Dtype::I64]),
        types("uint32", &[Dtype::U32]),
        types("uint64", &[Dtype::U64]),
        types("float16, float32", &[Dtype::F16, Dtype::F32]),
        types("bfloat16", &[Dtype::Bf16]),
        types("float64", &[Dtype::F64]),
        types("complex64", &[Dtype::C64]),
        types("complex128", &[Dtype::C128]),
    ];
    let shapes: [(&str, &[ReduceOp]); 5] = [
        ("SUM, MIN, MAX", &[ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max]),
        ("PRODUCT", &[ReduceOp::Product]),
        ("AVG", &[ReduceOp::Avg]),
        ("PREMUL_SUM", &[ReduceOp::PremulSum(2.0)]),
        ("BAND, BOR, BXOR", &[ReduceOp::Band, ReduceOp::Bor, ReduceOp::Bxor]),
    ];
    let vendors: Vec<Capabilities> = Vendor::ALL
        .iter()
        .map(|vendor| vendor.capabilities())
        .map(
            |able| if able.double == Double::AsFloat { Capabilities { double: Double::Refused, ..able } } else { able },
        )
        .collect();
    let titles = Vendor::ALL.map(|vendor| vendor.name().to_uppercase());
    let mut lines = vec![
        format!("| operation | types | {} |", titles.join(" | ")),
        format!("| --- | --- |{}", " --- |".repeat(titles.len())),
    ];
    for (kind, even, name) in [
        (Kind::Broadcast, true, "broadcast"),
        (Kind::AllGather, true, "all_gather"),
        (Kind::AllGather, false, "all_gather, blocks that differ"),
        (Kind::Gather, true, "gather"),
        (Kind::Scatter, true, "scatter"),
        (Kind::AllToAll, true, "all_to_all"),
        (Kind::Send, true, "send, recv"),
        (Kind::Barrier, true, "barrier"),
    ] {
        let cell = |able: &Capabilities| say(&[(kind, Dtype::F32, ReduceOp::Sum, even)], able);
        lines.push(format!(
            "| {name} | all but float64 | {} |",
            vendors.iter().map(cell).collect::<Vec<_>>().join(" | ")
        ));
    }
    let asked = [(Kind::Broadcast, Dtype::F64, ReduceOp::Sum, true)];
    let cells: Vec<String> = vendors.iter().map(|able| say(&asked, able)).collect();
    lines.push(format!("| any that only moves data | float64, complex128 | {} |", cells.join(" | ")));
    for (name, ops) in shapes {
        for (type_name, list) in &groups {
            let all: Vec<(Kind, Dtype, ReduceOp, bool)> = ops
                .iter()
                .flat_map(|op| list.iter().map(|dtype| (Kind::AllReduce, *dtype, *op, true)))
                .filter(|(_, dtype, op, _)| is_defined(*dtype, *op))
                .collect();
            if !all.is_empty() {
                let cells: Vec<String> = vendors.iter().map(|able| say(&all, able)).collect();
                lines.push(format!("| {name} | {type_name} | {} |", cells.join(" | ")));
            }
        }
    }
    let uneven = [(Kind::ReduceScatter, Dtype::F32, ReduceOp::Sum, false)];
    let cells: Vec<String> = vendors.iter().map(|able| say(&uneven, able)).collect();
    lines.push(format!("| reduce_scatter, blocks that differ | as above | {} |", cells.join(" | ")));
    lines.join("\n") + "\n"
}

/// Describes in a few words how a library carries out all of these operations.
fn say(all: &[(Kind, Dtype, ReduceOp, bool)], able: &Capabilities) -> String {
    let mut words: Vec<String> = all
        .iter()
        .map(|(kind, dtype, op, even)| {
            let asked =
                LoweringInput { kind: *kind, dtype: *dtype, op: *op, ranks: 4, equal_counts: *even, dense: true };
            let Ok(lowering) = lower(&asked, able) else { return "refused".into() };
            let local = |step: &Local| match step {
                Local::Cast(to) if *to == *dtype => String::new(),
                Local::Cast(to) => format!("cast to {}", to.name()),
                Local::Scale(_) => "scaled".into(),
                Local::Divide(_) => "divided".into(),
                Local::Fold(_) => "combined by each rank".into(),
            };
            let how = match (lowering.method, lowering.kind == *kind) {
                (Method::Native, true) => String::new(),
                (Method::Native, false) => lowering.kind.name().into(),
                (Method::Exchange, true) => if kind.is_p2p() { "" } else { "sends and receives" }.into(),
                (Method::Exchange, false) => format!("{} as sends and receives", lowering.kind),
                (Method::PerRoot, _) if *kind == Kind::AllGather => "one broadcast a rank".into(),
                (Method::PerRoot, _) => "one reduce a rank".into(),
            };
            let steps: Vec<String> =
                lowering.before.iter().map(local).chain([how]).chain(lowering.after.iter().map(local)).collect();
            let steps: Vec<String> = steps.into_iter().filter(|step| !step.is_empty()).collect();
            if steps.is_empty() { "native".into() } else { steps.join(", ") }
        })
        .collect();
    words.dedup();
    words.join("; or ")
}

#[test]
fn the_table_of_the_documentation_is_this_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/internals/vendors.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (begin, end) =
        ("<!-- lowerings: tests/it/device_lowering.rs writes this table -->\n", "<!-- end of lowerings -->");
    let start = page.find(begin).expect("docs/internals/vendors.md has its mark") + begin.len();
    let stop = page.find(end).expect("docs/internals/vendors.md has its second mark");
    if std::env::var_os("SAGELLM_WRITE_DOCS").is_some() {
        std::fs::write(path, format!("{}{}{}", &page[..start], table(), &page[stop..])).unwrap();
        return;
    }
    assert_eq!(&page[start..stop], table(), "run SAGELLM_WRITE_DOCS=1 cargo test --test it device_lowering");
}
