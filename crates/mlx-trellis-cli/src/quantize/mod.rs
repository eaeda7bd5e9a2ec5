//! `trellis quantize`: the matrices of a model to trellis codes, everything else as it was.
//!
//! A plan is made from names and shapes, carried out a tensor at a time into a folder that outlives the process, and
//! put together at the end.

mod calibration;
mod encode;
mod options;
mod plan;
mod report;
mod work;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::thread;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use trellis_codec::artifact::{ArtifactWriter, RawTensor, WriteOptions};

use calibration::Calibration;
use encode::Task;
pub(crate) use options::Args;
use plan::{Action, Plan};
use report::{Report, Row};
use work::WorkFolder;

use crate::progress::Progress;
use crate::source::{Identity, Source, set_dtype};

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let source = Source::open(&args.source)?;
    if let Some(tensor) = plan::quantized(&source).filter(|_| !args.requantize) {
        bail!(
            "{}: tensor {} is {}, expected a model that is not quantized (--requantize decodes it first)",
            args.source.display(),
            tensor.name,
            tensor.stored
        );
    }
    let calibration = args.calibration.as_deref().map(Calibration::open).transpose()?;
    let plan = Plan::new(args, &source, calibration.as_ref())?;
    if plan.weights() == 0 {
        let tensors = plan.steps.len();
        bail!("{}: found no matrix to quantize among {tensors} tensors", args.source.display());
    }
    if args.dry_run {
        dry_run(args, &plan)?;
        return Ok(ExitCode::SUCCESS);
    }
    let fingerprint = fingerprint(args, &source, &plan)?;
    let (work, published) = WorkFolder::open(&args.output, &fingerprint, args.restart)?;
    if published {
        return finish(args, &plan, work, None);
    }
    match carry_out(args, (&source, calibration.as_ref()), &plan, &fingerprint, &work) {
        Ok(resumed) => finish(args, &plan, work, Some(resumed)),
        Err(error) => Err(match work.abandon() {
            None => error,
            Some((path, finished)) => error.context(format!(
                "{finished} finished tensors are kept in {}: the same command goes on from there",
                path.display()
            )),
        }),
    }
}

/// What the result's bytes depend on: what was done before under another fingerprint must not be mixed in.
fn fingerprint(args: &Args, source: &Source, plan: &Plan) -> Result<Value> {
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "source": source.identity()?,
        "calibration": args.calibration.as_deref().map(Identity::of).transpose()?,
        "max_shard_bytes": args.max_shard_bytes,
        "plan": plan,
    }))
}

/// Codes what is not coded yet, and puts the artifact at the destination. Returns how many tensors had been coded.
fn carry_out(
    args: &Args,
    (source, calibration): (&Source, Option<&Calibration>),
    plan: &Plan,
    fingerprint: &Value,
    work: &WorkFolder,
) -> Result<usize> {
    // Made first: a destination that is taken is found out before the work.
    let mut writer = ArtifactWriter::create(
        &args.output,
        WriteOptions {
            max_shard_bytes: args.max_shard_bytes,
            overwrite: args.overwrite,
            staging: Some(work.staging()),
            ..WriteOptions::default()
        },
    )?;
    let mut config = plan.config(source.config());
    if let Some(dtype) = plan.config_dtype.filter(|_| source.has_config()) {
        set_dtype(&mut config, dtype);
    }
    writer.set_config(config.into())?;

    let progress = Progress::new(plan.weights(), args.json);
    let resumed = code(args.jobs(), (source, calibration), plan, work, &progress)?;
    progress.finish();

    for file in source.companions()? {
        writer.copy_file(file)?;
    }
    for (name, content) in source.files() {
        writer.add_file(name, content)?;
    }
    for (index, step) in plan.steps.iter().enumerate() {
        if matches!(step.action, Action::Keep { .. }) {
            let bytes = source.bytes(index, step.dtype)?;
            writer
                .add_tensor(&step.name, RawTensor { dtype: step.dtype, shape: &step.shape, bytes: &bytes })?;
        } else {
            encode::add(&mut writer, work, index, &record(work, index, step)?)?;
        }
    }
    work.mark(fingerprint)?;
    let summary = writer.finish()?;
    if let Some(leftover) = &summary.leftover {
        eprintln!("warning: could not remove {}", leftover.display());
    }
    Ok(resumed)
}

/// Codes what is not coded yet, some tensors at a time, and returns how many there were already. One thread reads, and does
/// what MLX does: its streams belong to threads.
fn code(
    jobs: usize,
    (source, calibration): (&Source, Option<&Calibration>),
    plan: &Plan,
    work: &WorkFolder,
    progress: &Progress,
) -> Result<usize> {
    let advance: &(dyn Fn(usize) + Sync) = &|n| progress.advance(n as u64);
    let finish = |task: Task| -> Result<()> {
        let index = task.index;
        let (parts, row) = encode::encode(task, &plan.steps[index], advance)?;
        work.finish(index, &parts, &row)?;
        progress.line(&row.to_string());
        Ok(())
    };
    let failure = OnceLock::new();
    let mut resumed = 0;
    thread::scope(|scope| -> Result<()> {
        let (sender, receiver) = mpsc::sync_channel::<Task>(0);
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..jobs {
            let (receiver, failure, finish) = (receiver.clone(), &failure, &finish);
            scope.spawn(move || {
                let next = || receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
                while let Ok(task) = next() {
                    // After a failure the tasks under way are taken and dropped, so that nobody waits to hand one over.
                    if failure.get().is_none() {
                        finish(task).unwrap_or_else(|error| drop(failure.set(error)));
                    }
                }
            });
        }
        drop(receiver);
        for (index, step) in plan.steps.iter().enumerate() {
            if failure.get().is_some() {
                break;
            }
            if matches!(step.action, Action::Keep { .. }) {
                continue;
            }
            if work.record::<Row>(index)?.is_some() {
                resumed += 1;
                progress.skip(step.len());
                continue;
            }
            let task = encode::read(source, calibration, index, step)?;
            match step.action {
                Action::Trellis(_) => sender.send(task).context("a thread that codes has panicked")?,
                _ => finish(task)?,
            }
        }
        Ok(())
    })?;
    match failure.into_inner() {
        Some(error) => Err(error),
        None => Ok(resumed),
    }
}

/// Reports and tidies; `resumed` is `None` where an earlier run did all but that.
fn finish(args: &Args, plan: &Plan, work: WorkFolder, resumed: Option<usize>) -> Result<ExitCode> {
    let mut rows = Vec::new();
    for (index, step) in plan.steps.iter().enumerate() {
        if !matches!(step.action, Action::Keep { .. }) {
            rows.push(record(&work, index, step)?);
        }
    }
    let report = Report::new(args, plan, &rows, resumed.unwrap_or(rows.len()));
    if let Some(file) = &args.report {
        work::write_whole(file, format!("{:#}\n", serde_json::to_value(&report)?).as_bytes())?;
    }
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        report.print();
    }
    work.remove()?;
    Ok(ExitCode::SUCCESS)
}

fn record(work: &WorkFolder, index: usize, step: &plan::Step) -> Result<Row> {
    work.record(index)?.with_context(|| format!("the record of {} is gone", step.name))
}

fn dry_run(args: &Args, plan: &Plan) -> Result<()> {
    if args.json {
        let [least, most] = plan.bytes();
        let json = json!({ "plan": plan.steps, "tensor_bytes": { "least": least, "most": most } });
        println!("{}", serde_json::to_string(&json)?);
    } else {
        report::print_plan(plan);
    }
    Ok(())
}
