//! Tests with metrics in the form of engines, and with invalid ones.

use kvfleet_errors_doc::says;

use super::*;

/// Metrics of vLLM with two ranks.
const VLLM_TEXT: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="m"} 9000.0
vllm:request_prompt_tokens_bucket{engine="0",le="1.0",model_name="m"} 0.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 4.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 2000.0
process_start_time_seconds 1.7e+09
"#;

const SGLANG_TEXT: &str = "sglang:num_running_reqs{model_name=\"m\"} \
    1.0\nsglang:num_queue_reqs{model_name=\"m\"} 3.0\n\
    sglang:token_usage{model_name=\"m\"} 0.5\nsglang:prompt_tokens_total 900.0\nsglang:num_requests_total \
    3.0\n";

fn read_text(text: &str) -> Result<LoadSample, LoadParseError> {
    parse(text.as_bytes(), 1_000)
}

fn with(name: &str, value: &str) -> Result<LoadSample, LoadParseError> {
    let lines = VLLM_TEXT.lines().filter(|line| !line.starts_with(name));
    read_text(&(lines.collect::<Vec<_>>().join("\n") + &format!("\n{name} {value}\n")))
}

#[test]
fn reads_the_load_of_each_dialect() {
    let reading = read_text(VLLM_TEXT).expect("a vLLM");
    let heard = EngineLoad {
        running: 7,
        waiting: 2,
        queue_tokens: 1_000,
        usage: Some(0.75),
        ..EngineLoad::default()
    };
    assert_eq!((reading.dialect, reading.load), (MetricsDialect::Vllm, heard));
    assert_eq!((reading.started_us, reading.finished_requests), (Some(1_700_000_000_000_000), Some(4.0)));
    let reading = read_text(SGLANG_TEXT).expect("an SGLang");
    let heard =
        EngineLoad { running: 1, waiting: 3, queue_tokens: 900, usage: Some(0.5), ..EngineLoad::default() };
    assert_eq!((reading.dialect, reading.load, reading.started_us), (MetricsDialect::Sglang, heard, None));
}

#[test]
fn assumes_the_configured_prompt_length_at_first() {
    let queued = |name, value| with(name, value).expect("valid metrics").load.queue_tokens;
    assert_eq!(queued("vllm:request_prompt_tokens_count", "0"), 2_000);
    let bare = "vllm:num_requests_running 0\nvllm:num_requests_waiting 5\n";
    let reading = read_text(bare).expect("sufficient metrics");
    assert_eq!(
        (reading.load.queue_tokens, reading.finished_requests, reading.load.usage),
        (5_000, None, None)
    );
    assert_eq!(queued("vllm:num_requests_waiting", "1e6"), 500_000_000);
}

#[test]
fn applies_the_cache_hit_rate_to_the_queue() {
    let cached = |hits: &str, asked: &str| {
        let text = format!(
            "{VLLM_TEXT}vllm:prefix_cache_hits_total {hits}\nvllm:prefix_cache_queries_total {asked}\n"
        );
        read_text(&text).expect("is read").load.queue_tokens
    };
    assert_eq!([cached("1500", "2000"), cached("0", "2000"), cached("0", "0")], [250, 1_000, 1_000]);
    assert_eq!([cached("2000", "2000"), cached("9000", "2000")], [10, 10], "waiting requests are never free");
    assert_eq!([cached("NaN", "2000"), cached("1500", "-1")], [1_000, 1_000], "invalid counts are ignored");
    let sglang = read_text(&format!("{SGLANG_TEXT}sglang:cached_tokens_total 600.0\n")).expect("is read");
    assert_eq!(sglang.load.queue_tokens, 300);
}

#[test]
fn refuses_implausible_numbers() {
    for name in [VLLM.running, VLLM.waiting, PROCESS_START, VLLM.prompts[0][0], VLLM.prompts[0][1]] {
        for value in ["NaN", "-1", "1e300", "+Inf", "-Inf", "-1e-9"] {
            assert!(matches!(with(name, value), Err(LoadParseError::Implausible { .. })), "{name} {value}");
        }
    }
    assert!(matches!(with(VLLM.running, "1000001"), Err(LoadParseError::Implausible { .. })));
    assert!(
        matches!(with(VLLM.prompts[0][0], "1e9"), Err(LoadParseError::Implausible { .. })),
        "prompts of 250 million"
    );
    let many = "vllm:num_requests_running 999999\nvllm:num_requests_running 2\nvllm:num_requests_waiting 0\n";
    assert!(matches!(read_text(many), Err(LoadParseError::Implausible { .. })), "the sum is too large");
}

#[test]
fn ignores_an_implausible_usage() {
    for value in ["NaN", "-1", "+Inf", "-1e-9", "1.01", "85.5"] {
        let reading = read_text(&format!("{SGLANG_TEXT}sglang:token_usage {value}\n"))
            .expect("the other metrics are used");
        assert_eq!((reading.load.running, reading.load.usage), (1, Some(0.5)), "{value}");
    }
    let only = "vllm:num_requests_running 3\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc NaN\n";
    let heard = read_text(only).expect("the other metrics are used").load;
    assert_eq!((heard.running, heard.usage), (3, None));
}

#[test]
fn explains_invalid_metrics() {
    let said = |read: Result<LoadSample, LoadParseError>| read.expect_err("must be refused").to_string();
    says("an engine's load that cannot be", &said(with(VLLM.waiting, "NaN")), &[]);
    says("an engine's metrics of something else", &said(read_text("go_goroutines 7\n")), &[]);
    says("an engine's metrics without how many wait", &said(read_text("vllm:num_requests_running 1\n")), &[]);
    says("an engine's metrics that are a page", &said(read_text("<html><body>404</body></html>")), &[]);
    says("an engine's metrics that are no text", &said(parse(b"a 1\n\x00\xff\xfe\n", 1)), &[]);
    says(
        "an engine's metrics with a line cut short",
        &said(read_text("vllm:num_requests_running{engine=\"0")),
        &[],
    );
}

fn reading(started_us: Option<u64>, ended: Option<f64>) -> LoadSample {
    LoadSample { started_us, finished_requests: ended, ..read_text(SGLANG_TEXT).expect("is read") }
}

#[test]
fn a_reported_start_never_decreases() {
    let mut life = ProcessIdentity::default();
    let mut hear = |started, ended| (life.observe(&reading(started, ended), 900), life.started_us());
    assert_eq!(hear(Some(100), Some(5.0)), (false, 100), "the first sample is no restart");
    assert_eq!(hear(Some(100), Some(6.0)), (false, 100));
    assert_eq!(hear(Some(200), Some(0.0)), (true, 200));
    assert_eq!(hear(Some(150), Some(1.0)), (false, 200), "an earlier start is ignored");
}

#[test]
fn decreased_counts_mean_a_restart() {
    let mut life = ProcessIdentity::default();
    let mut hear = |ended, now| (life.observe(&reading(None, ended), now), life.started_us());
    assert_eq!(hear(Some(5.0), 700), (false, 0), "the start is unknown");
    assert_eq!(hear(None, 701), (false, 0));
    assert_eq!(hear(Some(4.0), 800), (true, 800));
    assert_eq!(hear(Some(0.0), 800), (true, 801), "even at the same time");
    assert_eq!(hear(Some(0.0), 900), (false, 801));
}

#[test]
fn a_successor_starts_later() {
    let mut life = ProcessIdentity::default();
    life.observe(&reading(Some(1_000), Some(9.0)), 0);
    let mut next = life.successor();
    assert!(!next.observe(&reading(Some(500), Some(0.0)), 0), "its first sample");
    assert_eq!(next.started_us(), 1_001);
}

#[test]
fn reads_kv_capacity_and_token_latency() {
    let with_more = |text: &str, more: &str| read_text(&format!("{text}{more}")).expect("the load is known");
    let cache = "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"1000\"} 1.0\n\
                 vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"500\"} 1.0\n";
    let vllm = with_more(VLLM_TEXT, cache).load;
    assert_eq!((vllm.kv_tokens_max, vllm.kv_tokens()), (24_000, 18_000));
    for nonsense in ["", "{", "{num_gpu_blocks=\"9\"} 1\n", "{block_size=\"x\",num_gpu_blocks=\"-1\"} 1\n"] {
        let text = format!("vllm:cache_config_info{nonsense}");
        assert_eq!(with_more(VLLM_TEXT, &text).load.kv_tokens_max, 0, "{nonsense}");
    }
    let sglang = with_more(SGLANG_TEXT, "sglang:max_total_num_tokens{tp_rank=\"0\"} 5000\n");
    assert_eq!(
        (sglang.load.kv_tokens_max, sglang.load.kv_tokens(), sglang.token_latency),
        (5_000, 2_500, None)
    );
    let paced = |sum: &str, count: &str| {
        let name = "vllm:inter_token_latency_seconds";
        with_more(VLLM_TEXT, &format!("{name}_sum {sum}\n{name}_count {count}\n"))
    };
    let before = paced("1.0", "100").token_latency;
    assert_eq!(paced("1.5", "120").tbt_us(before), 25_000);
    assert_eq!(
        (paced("1.5", "100").tbt_us(before), paced("0.5", "20").tbt_us(before)),
        (0, 0),
        "no tokens, or a restart"
    );
    assert_eq!((paced("NaN", "120").tbt_us(before), paced("1.5", "120").tbt_us(None)), (0, 0));
    let older = "vllm:time_per_output_token_seconds_sum 3\nvllm:time_per_output_token_seconds_count 9\n";
    assert_eq!(with_more(VLLM_TEXT, older).token_latency, Some([3.0, 9.0]));
}
