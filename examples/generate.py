"""generate() from Python: two lines, and what they return."""

from workers.generate import generate, open_pipeline

pipeline = open_pipeline("demo", max_batch_size=8, max_length=512)
result = generate(
    pipeline,
    [[504, 3575, 282, 4649, 314], [34, 1232, 216, 34, 446]],
    max_new_tokens=8,
    temperature=0,
    output_logprobs=2,
)

for sequence, reason in zip(result.sequences, result.finish_reasons, strict=True):
    print(sequence, reason)
for log_probs in result.log_probs or []:
    print([round(logprob, 4) for logprob in log_probs.token_log_probabilities])
