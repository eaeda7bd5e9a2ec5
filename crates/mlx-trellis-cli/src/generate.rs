//! `trellis generate`: text from a prompt.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use mlx_trellis_models::{Generation, Message, Sampler, Sampling, Tokenizer, stop_tokens};
use serde::Serialize;

use crate::device::NO_DEVICE;
use crate::lm::{Peak, RunArgs};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder of the model: a Hugging Face or MLX one, or one that `trellis quantize` made
    #[arg(long)]
    model: PathBuf,
    /// What to say to it
    #[arg(long)]
    prompt: String,
    /// Message that sets the scene before it
    #[arg(long, conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the prompt as plain text instead of answering it as a chat
    #[arg(long)]
    raw: bool,
    /// Stop after so many tokens
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// What logits are divided by before a token is drawn; at 0 the most likely token is taken
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Draw from the most likely tokens that together have this probability
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Draw the same tokens as another run with this seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    run: RunArgs,
    /// Print one JSON object at the end instead of text as it comes
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    device: String,
    text: String,
    tokens: Vec<u32>,
    prompt_tokens: usize,
    prompt_tokens_per_s: f64,
    generated_tokens: usize,
    generated_tokens_per_s: f64,
    peak: Peak,
}

/// Runs the command. Text goes to stdout, figures to stderr.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let Some(device) = args.run.select() else { return Ok(ExitCode::from(NO_DEVICE)) };
    let sampling = Sampling { temperature: args.temperature, top_p: args.top_p, seed: args.seed };
    let sampler = Sampler::new(sampling)?;
    let tokenizer = Tokenizer::load(&args.model)?;
    let prompt = prompt(args, &tokenizer)?;
    let stop = stop_tokens(&args.model, &tokenizer)?;
    let mut model = args.run.load(&args.model)?;

    let started = Instant::now();
    let generation = Generation::new(&mut model, &prompt, sampler, &stop, args.max_tokens)?;
    let prompt_seconds = started.elapsed().as_secs_f64();

    let started = Instant::now();
    let (mut text, mut tokens) = (String::new(), Vec::new());
    let mut detokenizer = tokenizer.stream();
    let mut say = |piece: String| -> Result<()> {
        if !args.json && !piece.is_empty() {
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(piece.as_bytes())?;
            stdout.flush()?;
        }
        text.push_str(&piece);
        Ok(())
    };
    for token in generation {
        let token = token?;
        tokens.push(token);
        say(detokenizer.push(token)?)?;
    }
    let seconds = started.elapsed().as_secs_f64();
    say(detokenizer.finish()?)?;
    let report = Report {
        device,
        prompt_tokens: prompt.len(),
        prompt_tokens_per_s: prompt.len() as f64 / prompt_seconds,
        generated_tokens: tokens.len(),
        generated_tokens_per_s: tokens.len() as f64 / seconds,
        peak: Peak::now()?,
        text,
        tokens,
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!();
        eprintln!(
            "{}: prompt {} tokens, {:.1} a second; {} tokens generated, {:.1} a second; {}",
            report.device,
            report.prompt_tokens,
            report.prompt_tokens_per_s,
            report.generated_tokens,
            report.generated_tokens_per_s,
            report.peak
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn prompt(args: &Args, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    if args.raw {
        return Ok(tokenizer.encode(&args.prompt, true)?);
    }
    ensure!(
        tokenizer.has_chat_template(),
        "{}: found no chat template, expected one (or --raw, to continue the prompt as plain text)",
        args.model.display()
    );
    let system = args.system.iter().map(Message::system);
    let messages: Vec<Message> = system.chain([Message::user(&args.prompt)]).collect();
    Ok(tokenizer.encode(&tokenizer.chat(&messages)?, false)?)
}
